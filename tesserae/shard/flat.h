#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/split.h"
#include "tesserae/mesh/transfer.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/shard.h"

namespace tesserae::shard {

/// One parameter of a flat buffer. Tied parameters are one slot with several names.
struct Slot {
  std::vector<std::string> names;  ///< the first is the one that counts
  std::vector<int64_t> shape;      ///< of this rank's part, where the parameter is split among tensor-parallel ranks
  int64_t begin = 0;               ///< first element in the flat buffer
  int64_t elements = 0;
  mesh::Splits split = {};
  std::vector<int64_t> whole = {};  ///< shape of the whole tensor; given as {}: `shape`
  int dim = 0;                      ///< whose rows are cut (CutBy::rows); in memory it is the outermost
  int64_t end() const { return begin + elements; }
  int64_t row() const;  ///< elements for each index of `dim`
  /// Whole rows, one after the other in memory, in the order of dimensions that users know; and the reverse.
  at::Tensor shaped(const at::Tensor& elements) const;
  at::Tensor flattened(const at::Tensor& rows) const;
};

/// A flat buffer: the parameters of one unit that share dtype and requires_grad, one after the other. A description, no
/// memory.
///
/// discover_units puts matrices first, vectors (norms, biases) after them, so that the parameter groups
/// that people use are few contiguous runs. Each slot starts on 16 bytes in every dtype used; chunks are padded to 128
/// bytes.
class Flat {
 public:
  struct Dtypes {
    c10::ScalarType compute;
    c10::ScalarType reduce;
    c10::ScalarType master;
  };

  /// Each chunk that is cut by elements is a multiple of so many, 128 bytes in the narrowest dtype: NCCL demotes its
  /// protocol below (pytorch#195450).
  static constexpr int64_t chunk_alignment = 64;

  /// `parameters`: names and shapes, in the order of the buffer; by rows there is one. By elements frozen ones, of
  /// which there is no gradient and no optimizer state, are cut by `layout`'s P alone.
  Flat(std::string unit, std::vector<Slot> parameters, Dtypes dtypes, bool trainable, const mesh::Layout& layout,
       int rank, CutBy cut_by = CutBy::elements);
  /// The same parameters, cut by another layout.
  Flat with(const mesh::Layout& layout) const;

  const std::string& unit() const { return unit_; }
  /// The unit has become part of a larger model: puts `prefix` and a dot before all names.
  void rename(const std::string& prefix);
  const std::vector<Slot>& slots() const { return slots_; }
  const Dtypes& dtypes() const { return dtypes_; }
  void set_master_dtype(c10::ScalarType dtype) { dtypes_.master = dtype; }
  bool trainable() const { return trainable_; }
  void set_trainable() { trainable_ = true; }  ///< by rows only: what is frozen is cut the same

  int64_t elements() const { return elements_; }              ///< without padding at the end
  int64_t parameter_elements() const { return parameters_; }  ///< sum over slots, without any padding
  int64_t total() const { return chunk_ * layout_.degrees().optimizer; }
  int64_t chunk() const { return chunk_; }
  int64_t alignment() const { return alignment_; }  ///< elements of which a chunk is a multiple
  CutBy cut_by() const { return cut_by_; }
  int64_t gradient_piece() const { return total() / layout_.degrees().gradients; }
  int64_t parameter_piece() const { return total() / layout_.degrees().parameters; }

  // Where what this rank owns lies in the flat buffer.
  mesh::Range chunk_range() const { return piece(layout_.chunk(rank_), chunk()); }
  mesh::Range gradient_range() const { return piece(layout_.gradient_piece(rank_), gradient_piece()); }
  mesh::Range parameter_range() const { return piece(layout_.parameter_piece(rank_), parameter_piece()); }

  const mesh::Layout& layout() const { return layout_; }
  int rank() const { return rank_; }

  /// What of the slots lies in `range`, relative to its begin.
  std::vector<Slice> slices(const mesh::Range& range) const;
  /// The elements that belong to no slot, as ranges of the whole buffer.
  const std::vector<mesh::Range>& gaps() const { return gaps_; }

  /// True if the master is also what is gathered: P equals O, so there is no second copy of the parameters.
  bool master_is_piece() const { return layout_.degrees().parameters == layout_.degrees().optimizer; }

 private:
  static mesh::Range piece(int index, int64_t size) { return {index * size, (index + 1) * size}; }

  std::string unit_;
  std::vector<Slot> slots_;
  Dtypes dtypes_;
  bool trainable_;
  mesh::Layout layout_;
  int rank_;
  CutBy cut_by_;
  int64_t alignment_ = chunk_alignment;
  int64_t elements_ = 0;
  int64_t parameters_ = 0;
  int64_t chunk_ = 0;
  std::vector<mesh::Range> gaps_;
};

}  // namespace tesserae::shard
