#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/mesh/split.h"

namespace tesserae::checkpoint {

/// From a tensor as it is stored to the elements that a piece holds, whatever the two splits are. Computes places
/// instead of listing them: no memory that grows with the tensor. `piece` outlives it.
class Placement {
 public:
  /// `stored`: the order in which elements are read; `type`: theirs. Throws InvalidArgument for splits that the
  /// tensor's shape does not have.
  Placement(const Piece& piece, const mesh::Splits& stored, c10::ScalarType type);

  /// The run of the stored order that is the piece, if it is one, in the piece's own order.
  bool contiguous() const { return contiguous_; }

  /// Runs of the stored order in which the piece's elements lie, ascending. Runs are joined over gaps of up to
  /// `largest_gap` elements, so there are few where blocks are read whole anyway.
  std::vector<mesh::Range> runs(int64_t largest_gap) const;

  /// Puts values, element `first` of the stored order first, where they belong, converted to the piece's type; what is
  /// not the piece's is passed over.
  void put(int64_t first, std::string_view bytes) const;

 private:
  const Piece& piece_;
  mesh::Splits stored_;
  c10::ScalarType type_;
  mesh::Range wanted_;      // the piece's elements without padding
  int64_t piece_begin_;     // in the order of the piece's split: its first element
  bool contiguous_ = true;  // the piece is one run of the stored order
};

}  // namespace tesserae::checkpoint
