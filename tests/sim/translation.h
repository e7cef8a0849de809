#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <unordered_map>

#include "tests/sim/kind.h"

namespace tesserae::sim {

/// The arguments of an operator with other tensors in the place of theirs: on the meta device to know shapes, of the
/// tasks' mapping to compute. A tensor that is there twice is one tensor in the translation, too.
class Translation {
 public:
  using Twin = std::function<at::Tensor(const at::Tensor&)>;

  /// `device`: what a device among the arguments becomes. `generator`: what takes the place of a generator's argument.
  Translation(const Kind& kind, c10::Device device, Twin twin_of, c10::IValue generator = {});

  torch::jit::Stack arguments(const torch::jit::Stack& originals);
  /// Of one: tensors, lists of tensors and of perhaps tensors, devices. Anything else is what it was.
  c10::IValue value(const c10::IValue& original);

 private:
  at::Tensor twin(const at::Tensor& original);

  const Kind& kind_;
  c10::Device device_;
  Twin twin_of_;
  c10::IValue generator_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> twins_;
};

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& what);

}  // namespace tesserae::sim
