#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/fabric.h"

namespace tesserae::checkpoint {

/// The training state of a job whose ranks come to hold other parts of it: from the pieces that they have to those that
/// they are to have, bit for bit, as if it were saved and loaded. It goes through memory that all ranks see;
/// handover.cpp opens with how.
///
///   const at::Tensor window = fabric.everyone().share(Handover::window_bytes);
///   if (window.defined()) Handover(fabric, window, old_pieces).fill(new_pieces);
///
/// Pieces are in ordinary memory of the host. Each call is collective.
class Handover {
 public:
  static constexpr int64_t window_bytes = int64_t{32} << 20;

  /// `from` outlives it, and its values do not change. Throws InvalidArgument on all ranks if elements of a tensor are
  /// missing or written twice, or ranks say different things of one.
  Handover(comm::Fabric& fabric, at::Tensor window, const std::vector<Piece>& from);

  /// Whether any rank has that tensor. Not collective.
  bool has(const std::string& name) const { return tensors_.contains(name); }

  /// Fills pieces of other layouts and splits; padding stays as it is. What is optional and nobody has is left alone.
  /// Throws InvalidArgument for a piece that nobody has otherwise, or that is of another type or shape.
  void fill(const std::vector<Piece>& to) const;

 private:
  struct Tensor {
    Dtype type = Dtype::F32;
    std::vector<int64_t> shape;
    int64_t begin = 0;  ///< its first byte, where all tensors are in a row

    int64_t bytes() const;
  };
  /// Contiguous bytes of a piece, and where they are in that row.
  struct Run {
    int64_t begin = 0;
    int64_t bytes = 0;
    char* data = nullptr;
  };

  void learn(const std::vector<Piece>& from);
  std::vector<Run> runs_of(const std::vector<const Piece*>& pieces) const;

  comm::Fabric& fabric_;
  at::Tensor window_;
  std::map<std::string, Tensor> tensors_;
  int64_t bytes_ = 0;  // of all tensors
  std::vector<Run> written_;
};

}  // namespace tesserae::checkpoint
