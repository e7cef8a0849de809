#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace tesserae::autograd {

/// Watches when the gradients of some parameters are final in a backward, and takes them.
///
/// The hook sits on each parameter's AccumulateGrad node, which this object keeps alive; it reads .grad, empties it and
/// hands it on. After the object is gone the hooks do nothing, even if a graph still holds the nodes.
class GradientHooks {
 public:
  /// `take(i, gradient)` for parameters[i], on the thread that runs backward, without gradient mode.
  using Take = std::function<void(int, const at::Tensor&)>;
  /// Answers gradient_destination() for parameters[i].
  using Destination = std::function<at::Tensor(int)>;

  GradientHooks(const std::vector<at::Tensor>& parameters, Take take, Destination destination);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Where the node that computes the gradient of `parameter` may write it, which saves copying it there later: its slot
/// in a reduce buffer, [shape of the parameter] in its dtype, content undefined. The node must fill it, return it and
/// keep no reference (TiedGradient has one until the other node returns it); this call takes the buffer, and waits
/// until there is one. Undefined, and then the gradient is a tensor like any other, if the parameter is of no sharded
/// model, no leaf nor what TiedGradient::first() gave, has several names, its unit was used twice in the forward,
/// gradients are reduced in another dtype, the slot has one already or was given before in this backward, or somebody
/// else (hooks, torch::autograd::grad, create_graph) is to see the gradient. Called inside a backward, by the thread
/// that runs it. After the gradient accumulation fusion of Megatron-LM (github.com/NVIDIA/Megatron-LM).
at::Tensor gradient_destination(const at::Tensor& parameter);

}  // namespace tesserae::autograd
