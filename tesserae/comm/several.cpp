#include "tesserae/comm/several.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstddef>
#include <map>

#include "tesserae/base/copy.h"
#include "tesserae/comm/equal_pieces.h"

namespace tesserae::comm {
namespace {

// A piece of fewer bytes is better copied than sent by itself.
constexpr size_t packed_piece_bytes = 32 * 1024;

using Indices = std::vector<size_t>;

/// Which buffers travel together: one that is alone travels in place. In an order that sizes and dtypes alone decide,
/// so that all members have the same.
std::vector<Indices> parcels(const std::vector<at::Tensor>& buffers, const Group& group) {
  std::vector<Indices> all;
  std::map<c10::ScalarType, size_t> packed;  // by dtype: the parcel of its small buffers
  for (size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor& buffer = buffers[i];
    if (group.size() == 1 || buffer.nbytes() / static_cast<size_t>(group.size()) >= packed_piece_bytes) {
      all.push_back({i});
      continue;
    }
    const auto [parcel, is_new] = packed.try_emplace(buffer.scalar_type(), all.size());
    if (is_new) all.emplace_back();
    all[parcel->second].push_back(i);
  }
  return all;
}

/// Several buffers as one, whose pieces hold theirs one after the other.
class Parcel {
 public:
  Parcel(const std::vector<at::Tensor>& buffers, const Indices& indices, int pieces) : pieces_(pieces) {
    int64_t piece = 0;
    for (const size_t i : indices) {
      const int64_t elements = buffers[i].numel() / pieces;
      inside_.push_back({buffers[i], elements, piece});
      piece += elements;
    }
    packed_ = at::empty({pieces, piece}, buffers[indices.front()].options());
  }

  at::Tensor whole() const { return packed_.view(-1); }
  void pack() const { copy_pieces(0, pieces_, Way::in); }
  void unpack() const { copy_pieces(0, pieces_, Way::out); }
  void pack_piece(int index) const { copy_pieces(index, 1, Way::in); }
  void unpack_piece(int index) const { copy_pieces(index, 1, Way::out); }
  /// Where that piece of the n-th buffer is packed.
  at::Tensor place(size_t n, int index) const {
    return packed_.select(0, index).narrow(0, inside_[n].begin, inside_[n].elements);
  }

 private:
  enum class Way { in, out };
  struct Inside {
    at::Tensor buffer;
    int64_t elements;  // of a piece
    int64_t begin;     // in a piece of the parcel
  };

  void copy_pieces(int first, int count, Way way) const {
    packed_.is_cpu() ? copy_bytes(first, count, way) : copy_tensors(first, count, way);
  }

  void copy_tensors(int first, int count, Way way) const {
    for (const auto& one : inside_) {
      const at::Tensor rows = one.buffer.view({pieces_, one.elements}).narrow(0, first, count);
      const at::Tensor places = packed_.narrow(0, first, count).narrow(1, one.begin, one.elements);
      way == Way::in ? places.copy_(rows) : rows.copy_(places);
    }
  }

  // They are short: a copy of tensors would cost ten times what its bytes do.
  void copy_bytes(int first, int count, Way way) const {
    const auto size = static_cast<int64_t>(packed_.element_size()), stride = packed_.size(1) * size;
    for (const auto& one : inside_) {
      const int64_t bytes = one.elements * size;
      auto* place = static_cast<std::byte*>(packed_.data_ptr()) + first * stride + one.begin * size;
      auto* own = static_cast<std::byte*>(one.buffer.data_ptr()) + first * bytes;
      for (int i = 0; i < count; ++i, place += stride, own += bytes) {
        way == Way::in ? copy_memory(place, own, static_cast<size_t>(bytes))
                       : copy_memory(own, place, static_cast<size_t>(bytes));
      }
    }
  }

  const int pieces_;
  std::vector<Inside> inside_;
  at::Tensor packed_;
};

}  // namespace

void all_gather(Group& group, const std::vector<at::Tensor>& buffers, const Label& label, Wire wire) {
  for (const Indices& indices : parcels(buffers, group)) {
    if (indices.size() == 1) {
      group.all_gather(buffers[indices.front()], label, wire);
      continue;
    }
    const Parcel parcel(buffers, indices, group.size());
    parcel.pack_piece(group.rank());
    group.all_gather(parcel.whole(), label, wire);
    parcel.unpack();
  }
}

void reduce_scatter(Group& group, const std::vector<ReduceScatter>& all, const Label& label, Wire wire) {
  std::vector<at::Tensor> buffers;
  for (const auto& one : all) buffers.push_back(one.buffer);
  for (const Indices& indices : parcels(buffers, group)) {
    if (indices.size() == 1) {
      const auto& [buffer, output, scale] = all[indices.front()];
      output.defined() ? group.reduce_scatter_scaled(output, buffer, scale, label, wire)
                       : group.reduce_scatter(buffer, label, Reduction::sum, wire);
      continue;
    }
    const Parcel parcel(buffers, indices, group.size());
    parcel.pack();
    group.reduce_scatter(parcel.whole(), label, Reduction::sum, wire);
    parcel.unpack_piece(group.rank());
    for (size_t n = 0; n < indices.size(); ++n) {
      const auto& [buffer, output, scale] = all[indices[n]];
      if (!output.defined()) continue;
      at::Tensor out = output.view(-1);
      at::mul_out(out, parcel.place(n, group.rank()), at::scalar_tensor(scale, at::kDouble));
    }
  }
}

void all_reduce(Group& group, const std::vector<at::Tensor>& buffers, const Label& label, Wire wire) {
  if (group.size() == 1) return;
  for (const Indices& indices : parcels(buffers, group)) {
    if (indices.size() == 1) {
      group.all_reduce(buffers[indices.front()], label, Reduction::sum, wire);
      continue;
    }
    const Parcel parcel(buffers, indices, 1);
    parcel.pack();
    group.all_reduce(parcel.whole(), label, Reduction::sum, wire);
    parcel.unpack();
  }
}

}  // namespace tesserae::comm
