#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace tesserae::autograd {

/// Decides what becomes of the tensors that autograd saves for a backward: of all nodes, torch's own and
/// torch::autograd::Function's.
class Saving {
 public:
  virtual ~Saving() = default;
  /// What gives the tensor back in the backward (its values, detached), and gives it up when it is destroyed; empty:
  /// autograd keeps the tensor, and the backward throws InvalidArgument if it was changed in place. Called without
  /// gradient mode.
  virtual std::function<at::Tensor()> save(const at::Tensor& tensor) = 0;
};

/// From now on this thread's forwards save through `saving`, until the next call; null, or one that is gone: as always.
/// What is recomputed in a backward is never saved so, since it is needed at once. Returns what was set before.
///
/// torch asks its autograd engine for the hooks of a tensor that is saved, and Python's engine knows Python's only: the
/// first call puts an engine of ours in front of torch's for programs without Python. Throws InvalidArgument in a
/// process with Python, which has torch.autograd.graph.saved_tensors_hooks.
std::weak_ptr<Saving> set_saving(std::weak_ptr<Saving> saving);

}  // namespace tesserae::autograd
