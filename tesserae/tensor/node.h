#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tesserae/base/error.h"
#include "tesserae/tensor/functions.h"

namespace tesserae::tensor {

/// What an autograd node of this layer keeps besides tensors: among whom, and along which dimension.
struct Kept : torch::CustomClassHolder {
  Kept(ParallelPtr among, int64_t along) : parallel(std::move(among)), dim(along) {}

  ParallelPtr parallel;
  int64_t dim;
};

inline void keep(torch::autograd::AutogradContext* context, const ParallelPtr& parallel, int64_t dim = 0) {
  context->saved_data["kept"] = c10::IValue::make_capsule(c10::make_intrusive<Kept>(parallel, dim));
}

/// Also makes sure that nobody differentiates twice, which would silently leave out the other ranks.
inline c10::intrusive_ptr<Kept> kept(torch::autograd::AutogradContext* context) {
  if (at::GradMode::is_enabled()) {
    throw InvalidArgument("backward", "functions of split tensors have first derivatives only (create_graph is set)");
  }
  return c10::static_intrusive_pointer_cast<Kept>(context->saved_data["kept"].toCapsule());
}

}  // namespace tesserae::tensor
