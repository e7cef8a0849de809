#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <utility>

namespace tesserae::autograd {

/// The gradient of a parameter that two nodes of a forward use, such as an embedding's table that is the head's weight,
/// too. Autograd would hold what the head brings until the embedding has as much to add to it: the size of the table,
/// through the whole backward. Here the first gradient stays with this object, computed where it will be reduced if
/// that place is to be had (gradient_destination), and the other node adds to it, in place, only the rows that it has.
///
/// One for each forward. Both nodes must lie in one backward, as they do where the one's result depends on the other's.
/// On the thread that computes.
class TiedGradient : public torch::CustomClassHolder {
 public:
  /// For the node that comes last in backward, in its forward: it will ask for take(), and return the sum for
  /// `parameter`.
  void expect_sum(const at::Tensor& parameter) { parameter_ = parameter.unsafeGetTensorImpl(); }
  /// `parameter` for the node that comes first in backward: a view of it, whose gradient `tied` keeps if expect_sum()
  /// was called for it, and which is autograd's to add if it was not, or if it is to be differentiated again. What the
  /// node gives as its gradient must be nobody else's: it is changed in place. Throws InvalidArgument without `tied`.
  static at::Tensor first(const c10::intrusive_ptr<TiedGradient>& tied, const at::Tensor& parameter);
  /// For the other node's backward: what was kept, which is its own from then on; undefined if nothing was.
  at::Tensor take() { return std::exchange(gradient_, at::Tensor()); }

 private:
  friend struct KeepGradient;
  const void* parameter_ = nullptr;  // of which the sum is expected
  at::Tensor gradient_;
};

using TiedGradientPtr = c10::intrusive_ptr<TiedGradient>;

/// The leaf of which `tensor` is the view that first() gave; `tensor` itself if it is none.
at::Tensor tied_leaf(const at::Tensor& tensor);

}  // namespace tesserae::autograd
