#include "tesserae/comm/several.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstddef>
#include <map>

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
  Parcel(const std::vector<at::Tensor>& buffers, const Indices& indices, int pieces) {
    int64_t piece = 0;
    for (const size_t i : indices) {
      const int64_t elements = buffers[i].numel() / pieces;
      inside_.push_back({buffers[i].view({pieces, elements}), piece});
      piece += elements;
    }
    packed_ = at::empty({pieces, piece}, buffers[indices.front()].options());
  }

  at::Tensor whole() const { return packed_.view(-1); }
  void pack() const {
    for (const auto& one : inside_) place_of(one).copy_(one.rows);
  }
  void unpack() const {
    for (const auto& one : inside_) one.rows.copy_(place_of(one));
  }
  void pack_piece(int index) const {
    for (const auto& one : inside_) place_of(one)[index].copy_(one.rows[index]);
  }
  /// A piece of the n-th buffer, packed and in its place.
  at::Tensor packed_piece(size_t n, int index) const { return place_of(inside_[n])[index]; }
  at::Tensor piece(size_t n, int index) const { return inside_[n].rows[index]; }

 private:
  struct Inside {
    at::Tensor rows;  // by piece
    int64_t begin;    // in a piece of the parcel
  };
  at::Tensor place_of(const Inside& one) const { return packed_.narrow(1, one.begin, one.rows.size(1)); }

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
    for (size_t n = 0; n < indices.size(); ++n) {
      const auto& [buffer, output, scale] = all[indices[n]];
      const at::Tensor sum = parcel.packed_piece(n, group.rank());
      if (output.defined()) {
        at::Tensor out = output.view(-1);
        at::mul_out(out, sum, at::scalar_tensor(scale, at::kDouble));
      } else {
        parcel.piece(n, group.rank()).copy_(sum);
      }
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
