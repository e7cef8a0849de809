#include "tesserae/checkpoint/handover.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "tesserae/base/copy.h"
#include "tesserae/base/error.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_tensor.h"

// All tensors are put in a row, each in its row-major order, and a window passes over the row. At each place every rank
// writes what it has there (of several ranks that have the same, the one that would save it), and takes what it wants.
// The window has two halves: while some still read one, others write the next, so that a barrier a half is enough. It
// is small beside the state, and stays in the caches; no page of memory is new but those of the state itself.
namespace tesserae::checkpoint {
namespace {

Dtype type_of(const Piece& piece) {
  return dtype_of(piece.data.scalar_type());
}

void require_ordinary(const Piece& piece) {
  if (piece.data.is_cpu() && piece.data.is_contiguous() && !offload::is_paged(piece.data)) return;
  throw InvalidArgument("Handover", cat("tensor \"", piece.name, "\" is not in ordinary memory of the host"));
}

/// Copies between the window, which shows [begin, begin + size) of the row, and runs (ascending), from `next` on; runs
/// that end here are passed.
template <class Runs, class Copy>
void pass(const Runs& runs, size_t& next, int64_t begin, int64_t size, const Copy& copy) {
  for (size_t i = next; i < runs.size() && runs[i].begin < begin + size; ++i) {
    const int64_t first = std::max(runs[i].begin, begin), end = runs[i].begin + runs[i].bytes;
    const int64_t last = std::min(end, begin + size);
    if (first < last) copy(first - begin, runs[i].data + (first - runs[i].begin), static_cast<size_t>(last - first));
    if (end <= begin + size && i == next) ++next;
  }
}

}  // namespace

int64_t Handover::Tensor::bytes() const {
  return std::accumulate(shape.begin(), shape.end(), element_bytes(type), std::multiplies<>());
}

Handover::Handover(comm::Fabric& fabric, at::Tensor window, const std::vector<Piece>& from)
    : fabric_(fabric), window_(std::move(window)) {
  learn(from);
  std::vector<const Piece*> written;
  for (const Piece& piece : from) {
    if (piece.written) written.push_back(&piece);
  }
  written_ = runs_of(written);
  int64_t bytes = 0;
  for (const Run& run : written_) bytes += run.bytes;
  int64_t all = 0;
  for (const auto& [name, tensor] : tensors_) all += tensor.bytes();
  if (const int64_t sum = comm::counts_over_ranks(fabric_, {bytes})[0]; sum != all) {
    throw InvalidArgument("Handover", cat("the ranks have ", sum, " bytes of tensors of ", all));
  }
}

/// What there is, of all ranks.
void Handover::learn(const std::vector<Piece>& from) {
  nlohmann::json own = nlohmann::json::array();
  for (const Piece& piece : from) {
    if (piece.written && piece.data.numel() > 0) own.push_back({piece.name, to_string(type_of(piece)), piece.shape});
  }
  const std::string text = own.dump();
  for (int rank = 0; rank < fabric_.size(); ++rank) {
    for (const auto& told : nlohmann::json::parse(comm::text_of(fabric_, text, rank))) {
      const Tensor tensor{dtype_from_name(told.at(1).get<std::string>()).value(), told.at(2)};
      const auto& known = tensors_.try_emplace(told.at(0), tensor).first->second;
      if (known.type == tensor.type && known.shape == tensor.shape) continue;
      throw InvalidArgument("Handover", cat("rank ", rank, " has tensor \"", told.at(0).get<std::string>(),
                                            "\" in another type or shape than ranks before it"));
    }
  }
  constexpr int64_t alignment = 64;
  for (auto& [name, tensor] : tensors_) {
    tensor.begin = bytes_;
    bytes_ += tensor.bytes();
    bytes_ = (bytes_ + alignment - 1) / alignment * alignment;
  }
}

std::vector<Handover::Run> Handover::runs_of(const std::vector<const Piece*>& pieces) const {
  std::vector<Run> runs;
  for (const Piece* piece : pieces) {
    if (piece->data.numel() == 0) continue;
    require_ordinary(*piece);
    const Tensor& tensor = tensors_.at(piece->name);
    const int64_t width = element_bytes(tensor.type);
    char* const data = static_cast<char*>(piece->data.mutable_data_ptr());
    mesh::for_each_run(piece->shape, piece->split, piece->elements, {},
                       [&](const mesh::Range& own, const mesh::Range& whole) {
                         runs.push_back({tensor.begin + whole.begin * width, whole.size() * width,
                                         data + (own.begin - piece->elements.begin) * width});
                       });
  }
  std::ranges::sort(runs, {}, &Run::begin);
  return runs;
}

void Handover::fill(const std::vector<Piece>& to) const {
  std::vector<const Piece*> wanted;
  for (const Piece& piece : to) {
    const auto found = tensors_.find(piece.name);
    const auto refuse = [&](const std::string& what) {
      throw InvalidArgument("Handover", cat("tensor \"", piece.name, "\" ", what));
    };
    if (found == tensors_.end()) {
      if (!piece.optional && piece.data.numel() > 0) refuse("is nobody's");
      continue;
    }
    if (found->second.shape != piece.shape || found->second.type != type_of(piece)) {
      refuse("is of another type or shape here");
    }
    wanted.push_back(&piece);
  }
  const std::vector<Run> runs = runs_of(wanted);
  char* const window = static_cast<char*>(window_.mutable_data_ptr());
  const int64_t half = window_.numel() / 2;
  size_t written = 0, taken = 0;
  for (int64_t begin = 0, turn = 0; begin < bytes_; begin += half, ++turn) {
    char* const shown = window + (turn % 2) * half;
    pass(written_, written, begin, half,
         [shown](int64_t at, const char* data, size_t bytes) { copy_memory(shown + at, data, bytes); });
    crash_point("handing-over", fabric_.rank());
    fabric_.everyone().barrier({}, "handing the state over");
    pass(runs, taken, begin, half,
         [shown](int64_t at, char* data, size_t bytes) { copy_memory(data, shown + at, bytes); });
  }
  fabric_.everyone().barrier({}, "handing the state over");  // before the window shows anything else
}

}  // namespace tesserae::checkpoint
