#include "tesserae/shard/user_tensor.h"

#include "tesserae/shard/compute_storage.h"

namespace tesserae::shard {
namespace {

class PlainTensor final : public UserTensor {
 public:
  PlainTensor(const at::Tensor& tensor, bool keeps_shape) : tensor_(tensor), keeps_shape_(keeps_shape) {}

  at::Tensor values() const override { return tensor_; }
  void show(const at::Tensor& values) override {
    accept_data_of(tensor_, values.device());
    tensor_.set_data(values);
  }
  bool requires_grad() const override { return tensor_.requires_grad(); }
  bool keeps_shape() const override { return keeps_shape_; }
  at::Tensor gradient() const override { return tensor_.grad(); }
  void show_gradient(const at::Tensor& gradient) override {
    at::Tensor& now = tensor_.mutable_grad();
    if (!now.is_same(gradient)) now = gradient;
  }

 private:
  at::Tensor tensor_;
  bool keeps_shape_;
};

}  // namespace

UserTensors plain_tensors(const std::vector<at::Tensor>& tensors, bool keep_shapes) {
  UserTensors all;
  for (const auto& tensor : tensors) all.push_back(std::make_shared<PlainTensor>(tensor, keep_shapes));
  return all;
}

}  // namespace tesserae::shard
