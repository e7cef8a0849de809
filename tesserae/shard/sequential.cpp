#include "tesserae/shard/sequential.h"

namespace tesserae::shard {

WrapPolicy wrap_larger_than(int64_t parameters) {
  return [parameters](size_t, const torch::nn::Module& module) {
    int64_t elements = 0;
    for (const auto& parameter : module.parameters()) elements += parameter.numel();
    return elements >= parameters;
  };
}

AnyUnitImpl::AnyUnitImpl(torch::nn::AnyModule module) : module_(std::move(module)) {
  // Registering the parameters here as well (the same tensors) keeps the names of the unwrapped module.
  const auto inner = module_.ptr();
  for (const auto& item : inner->named_parameters(/*recurse=*/false)) {
    register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (const auto& item : inner->named_buffers(/*recurse=*/false)) register_buffer(item.key(), item.value());
  for (const auto& child : inner->named_children()) register_module(child.key(), child.value());
}

void AnyUnitImpl::train(bool on) {
  torch::nn::Module::train(on);
  module_.ptr()->train(on);  // the wrapped module itself is not in the tree, only its parts are
}

SequentialUnitsImpl::SequentialUnitsImpl(const torch::nn::Sequential& sequential, const WrapPolicy& policy) {
  size_t index = 0;
  for (const auto& child : *sequential) {
    const std::string name = std::to_string(index);
    if (policy(index, *child.ptr())) {
      auto unit = register_module(name, Unit<AnyUnitImpl>(child).ptr());
      chain_.emplace_back([unit](const at::Tensor& input) { return unit->forward(input); });
    } else {
      register_module(name, child.ptr());
      chain_.emplace_back(
          [child = torch::nn::AnyModule(child)](const at::Tensor& input) mutable { return child.forward(input); });
    }
    ++index;
  }
}

at::Tensor SequentialUnitsImpl::forward(const at::Tensor& input) {
  at::Tensor output = input;
  for (const auto& link : chain_) output = link(output);
  return output;
}

}  // namespace tesserae::shard
