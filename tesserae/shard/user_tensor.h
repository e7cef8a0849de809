#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace tesserae::shard {

/// A tensor of the user's that shows what this rank holds of a parameter: where its values and its gradient are kept.
/// Used from the thread that computes and in a backward from autograd's, one call at a time.
class UserTensor {
 public:
  virtual ~UserTensor() = default;

  /// What the tensor holds now, which the user may have replaced: any shape, on the meta device where it has no values
  /// yet.
  virtual at::Tensor values() const = 0;
  /// Holds `values` from now on; it is their memory. One without values yet may stay so.
  virtual void show(const at::Tensor& values) = 0;
  virtual bool requires_grad() const = 0;
  /// Whether it is shown in the parameter's shape where this rank holds all of it whatever the sizes (O is 1); else
  /// flat.
  virtual bool keeps_shape() const { return false; }
  /// Undefined: none.
  virtual at::Tensor gradient() const = 0;
  virtual void show_gradient(const at::Tensor& gradient) = 0;
};

using UserTensors = std::vector<std::shared_ptr<UserTensor>>;

/// Tensors that are themselves what is shown, as torch::optim knows them.
UserTensors plain_tensors(const std::vector<at::Tensor>& tensors, bool keep_shapes = false);

}  // namespace tesserae::shard
