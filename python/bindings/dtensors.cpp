#include "python/bindings/dtensors.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "tesserae/base/error.h"

namespace tesserae::bindings {
namespace {

const at::Tensor& unpacked(const py::handle& tensor) {
  return THPVariable_Unpack(tensor.ptr());
}

// Where a tensor of a class of its own (__torch_dispatch__) keeps its values; others are dense themselves.
py::object dense_of(const py::object& tensor) {
  constexpr const char* flatten = "__tensor_flatten__";
  if (THPVariable_CheckExact(tensor.ptr()) || !py::hasattr(tensor, flatten)) return tensor;
  return tensor.attr(py::object(py::object(tensor.attr(flatten)())[py::int_(0)])[py::int_(0)]);
}

class UserDTensor final : public shard::UserTensor {
 public:
  UserDTensor(const py::object& parameter, const py::object& make_gradient)
      : python_(new Python{parameter, make_gradient}) {}
  ~UserDTensor() override {
    const py::gil_scoped_acquire acquire;
    python_.reset();
  }

  at::Tensor values() const override {
    const py::gil_scoped_acquire acquire;
    return unpacked(dense_of(local_of(python_->parameter)));
  }

  void show(const at::Tensor& values) override {
    const py::gil_scoped_acquire acquire;
    const py::object local = local_of(python_->parameter), dense = dense_of(local);
    if (unpacked(dense).is_meta()) return;
    if (dense.is(local) || unpacked(dense).sizes() == values.sizes()) {
      unpacked(dense).set_data(values);
      return;
    }
    // A tensor of a class of its own cannot change its size: another one takes its place.
    const py::object other = local.attr("new_zeros")(values.sizes());
    unpacked(dense_of(other)).set_data(values);
    py::setattr(python_->parameter, local_name, other);
  }

  bool requires_grad() const override { return parameter().requires_grad(); }

  at::Tensor gradient() const override {
    const at::Tensor& gradient = parameter().grad();
    if (!gradient.defined()) return gradient;
    const py::gil_scoped_acquire acquire;
    const py::object theirs = py::cast(gradient);
    if (!py::hasattr(theirs, local_name)) {
      throw InvalidArgument("fully_shard",
                            "the .grad of a sharded parameter was replaced by a plain tensor; set it to "
                            "None, or to a DTensor that is placed as the parameter is");
    }
    return unpacked(local_of(theirs));
  }

  void show_gradient(const at::Tensor& gradient) override {
    at::Tensor& now = parameter().mutable_grad();
    if (!gradient.defined()) {
      now = gradient;
      return;
    }
    const py::gil_scoped_acquire acquire;
    if (now.defined()) {
      const at::Tensor& local = unpacked(local_of(py::cast(now)));
      if (local.sizes() == gradient.sizes() && local.const_data_ptr() == gradient.const_data_ptr()) return;
    }
    now = unpacked(python_->make_gradient(python_->parameter, py::cast(gradient)));
  }

 private:
  static constexpr const char* local_name = "_local_tensor";
  // Not kept as a tensor of C++: torch.utils.swap_tensors, by which modules move, allows no other reference.
  const at::Tensor& parameter() const { return unpacked(python_->parameter); }
  static py::object local_of(const py::object& tensor) { return tensor.attr(local_name); }

  struct Python {
    py::object parameter, make_gradient;
  };
  std::unique_ptr<Python> python_;  // behind a pointer: C++ owns it without the GIL
};

}  // namespace

shard::UserTensors dtensors(const std::vector<py::object>& parameters, const py::object& make_gradient) {
  shard::UserTensors all;
  for (const auto& parameter : parameters) all.push_back(std::make_shared<UserDTensor>(parameter, make_gradient));
  return all;
}

}  // namespace tesserae::bindings
