#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace tesserae::shard {

/// Watches when the gradients of some parameters are final in a backward, and takes them.
///
/// The hook sits on each parameter's AccumulateGrad node, which this object keeps alive; it reads .grad, empties it and
/// hands it on. After the object is gone the hooks do nothing, even if a graph still holds the nodes.
class GradientHooks {
 public:
  /// `take(i, gradient)` for parameters[i], on the thread that runs backward, without gradient mode.
  using Take = std::function<void(int, const at::Tensor&)>;

  GradientHooks(const std::vector<at::Tensor>& parameters, Take take);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// True on a thread that is running a backward: a forward is a recomputation.
bool in_backward();

/// Calls `task` once when the current backward (the one that this thread runs) has finished all nodes.
void at_end_of_backward(std::function<void()> task);

}  // namespace tesserae::shard
