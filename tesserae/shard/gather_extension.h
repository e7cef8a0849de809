#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tesserae::shard {

/// A parameter that decides itself what travels when it is gathered, and what is computed with: 8-bit numbers and a
/// scale in place of its rows, say. FSDP2's fsdp_pre_all_gather and fsdp_post_all_gather are one.
///
/// Called on the thread that computes, or in a backward on autograd's, in an order that is the same on all ranks. What
/// it throws ends the step.
class GatherExtension {
 public:
  virtual ~GatherExtension() = default;

  /// What this rank brings, made of its rows as they are now: dense tensors on the device that computes, as many, and
  /// of the same shapes and dtypes, on all ranks.
  virtual std::vector<at::Tensor> inputs() = 0;

  /// Makes what is computed with of what the ranks brought: for each input one tensor, theirs one after the other along
  /// the first dimension. They are the same tensors each time, in memory that is there while the parameter is gathered.
  /// `first`: they are new, and so is what is made of them; returns further tensors that need memory just as long.
  virtual std::vector<at::Tensor> make(const std::vector<at::Tensor>& outputs, bool first) = 0;
};

}  // namespace tesserae::shard
