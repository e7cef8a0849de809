#include "tests/sim/translation.h"

#include <optional>
#include <utility>

namespace tesserae::sim {

using torch::jit::Stack;

Translation::Translation(const Kind& kind, c10::Device device, Twin twin_of, c10::IValue generator)
    : kind_(kind), device_(device), twin_of_(std::move(twin_of)), generator_(std::move(generator)) {}

Stack Translation::arguments(const Stack& originals) {
  Stack all;
  for (size_t i = 0; i < originals.size(); ++i) {
    all.push_back(static_cast<int>(i) == kind_.generator ? generator_ : value(originals[i]));
  }
  return all;
}

c10::IValue Translation::value(const c10::IValue& original) {
  if (original.isTensor()) return twin(original.toTensor());
  if (original.isDevice()) return device_;
  if (original.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : original.toTensorVector()) list.push_back(twin(tensor));
    return list;
  }
  if (original.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : original.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(twin(*tensor)) : std::nullopt);
    }
    return list;
  }
  return original;
}

at::Tensor Translation::twin(const at::Tensor& original) {
  if (!original.defined()) return original;
  at::Tensor& twin = twins_[original.unsafeGetTensorImpl()];
  if (!twin.defined()) twin = twin_of_(original);
  return twin;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& what) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) what(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, what);
  }
}

}  // namespace tesserae::sim
