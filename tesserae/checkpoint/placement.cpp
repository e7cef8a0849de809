#include "tesserae/checkpoint/placement.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>

#include "tesserae/base/copy.h"
#include "tesserae/offload/paged_tensor.h"

// Blocks come in the stored order, so the question that put() asks is the inverse of "where is my element stored?":
// where, in the order of the piece's split, does an element of stored part j lie? mesh::for_each_run answers that too,
// with the two splits exchanged: what lies within the piece's stretch of that order is its own.
namespace tesserae::checkpoint {

using mesh::Range;

Placement::Placement(const Piece& piece, const mesh::Splits& stored, c10::ScalarType type)
    : piece_(piece),
      stored_(mesh::stored_order(piece.shape, stored)),
      type_(type),
      wanted_(piece.elements),
      piece_begin_(mesh::part_begin(piece.shape, piece.split)) {
  const int64_t real = mesh::part_elements(piece.shape, piece.split);
  wanted_ = {std::min(wanted_.begin, real), std::min(wanted_.end, real)};
  int64_t count = 0;
  mesh::for_each_run(piece.shape, piece.split, wanted_, stored_, [&](const Range&, const Range&) { ++count; });
  contiguous_ = count <= 1;
}

std::vector<Range> Placement::runs(int64_t largest_gap) const {
  std::map<int64_t, int64_t> joined;  // begin -> end
  mesh::for_each_run(piece_.shape, piece_.split, wanted_, stored_, [&](const Range&, const Range& to) {
    auto place = joined.upper_bound(to.begin);
    if (place != joined.begin() && to.begin - std::prev(place)->second <= largest_gap) {
      --place;
      place->second = std::max(place->second, to.end);
    } else {
      place = joined.emplace_hint(place, to.begin, to.end);
    }
    for (auto next = std::next(place); next != joined.end() && next->first - place->second <= largest_gap;) {
      place->second = std::max(place->second, next->second);
      next = joined.erase(next);
    }
  });
  std::vector<Range> result;
  for (const auto& [begin, end] : joined) result.push_back({begin, end});
  return result;
}

void Placement::put(int64_t first, std::string_view bytes) const {
  const auto count = static_cast<int64_t>(bytes.size() / c10::elementSize(type_));
  at::Tensor values = at::from_blob(const_cast<char*>(bytes.data()), {count}, type_);
  if (type_ != piece_.data.scalar_type()) values = values.to(piece_.data.scalar_type());
  const auto* const source = static_cast<const char*>(values.const_data_ptr());
  const auto width = static_cast<int64_t>(values.element_size());
  const at::Tensor target = piece_.data.detach().view({-1});
  const bool direct = target.is_cpu() && !offload::is_paged(target);
  char* const memory = direct ? static_cast<char*>(target.mutable_data_ptr()) : nullptr;

  const int64_t own_begin = piece_begin_ + wanted_.begin;
  const int64_t own_end = piece_begin_ + wanted_.end;
  for (int64_t next = first; next < first + count;) {
    const mesh::Splits part = mesh::part_at(piece_.shape, stored_, next);
    const int64_t part_begin = mesh::part_begin(piece_.shape, part);
    const int64_t end = std::min(first + count, part_begin + mesh::part_elements(piece_.shape, part));
    mesh::for_each_run(piece_.shape, part, {next - part_begin, end - part_begin}, piece_.split,
                       [&](const Range& from, const Range& to) {
                         const int64_t begin = std::max(to.begin, own_begin);
                         const int64_t size = std::min(to.end, own_end) - begin;
                         if (size <= 0) return;
                         const int64_t read = part_begin + from.begin + (begin - to.begin) - first;
                         if (memory != nullptr) {
                           copy_memory(memory + (begin - own_begin) * width, source + read * width,
                                       static_cast<size_t>(size * width));
                         } else {
                           offload::copy(target.narrow(0, begin - own_begin, size), values.narrow(0, read, size));
                         }
                       });
    next = end;
  }
}

}  // namespace tesserae::checkpoint
