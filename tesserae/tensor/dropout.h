#pragma once

#include <ATen/core/Tensor.h>

#include "tesserae/tensor/functions.h"

namespace tesserae::tensor {

/// Where a tensor that dropout works on is.
enum class Placement {
  repeated,  ///< the same on all ranks: they draw the same mask, if their default generators are in the same state
  split,     ///< each rank has its piece: they draw different masks, and leave the generators in the same state
};

/// Zeroes each element with probability `share` in training and scales what is left, so that the mean stays. Ranks of
/// one tensor-parallel group are seeded alike (run.random_seed and the data-parallel rank); masks of split tensors are
/// drawn from a generator of their own, seeded from the host's default generator and the tensor index, so that
/// recomputed activations (autograd/recompute.h) have the same.
at::Tensor dropout(const at::Tensor& x, double share, bool training, Placement placement, const ParallelPtr& parallel);

}  // namespace tesserae::tensor
