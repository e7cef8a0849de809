#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tesserae::shard {

/// A collective of the user's in place of the engine's own (FSDP2's set_custom_all_gather and
/// set_custom_reduce_scatter), for all that one unit sends at a time. Called on the lane, in an order that is the same
/// on all ranks, and done when it returns. What it throws ends the step.
class UserCollective {
 public:
  virtual ~UserCollective() = default;

  /// `buffers` are `pieces` equal pieces each. A gather: piece `index` is this rank's, and the others are to be filled.
  /// A reduce-scatter: piece `index` is to be the sum of what all ranks have there; the others are left undefined.
  virtual void run(const std::vector<at::Tensor>& buffers, int index, int pieces) = 0;
};

}  // namespace tesserae::shard
