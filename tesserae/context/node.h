#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tesserae/base/error.h"

namespace tesserae::context {

/// Keeps what a node of this layer was called with, besides tensors.
template <class Call>
void keep(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Call>& call) {
  context->saved_data["call"] = c10::IValue::make_capsule(call);
}

/// Also makes sure that nobody differentiates twice, which would silently leave out the other ranks.
template <class Call>
c10::intrusive_ptr<Call> kept(torch::autograd::AutogradContext* context) {
  if (at::GradMode::is_enabled()) {
    throw InvalidArgument("backward", "functions of cut sequences have first derivatives only (create_graph is set)");
  }
  return c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
}

}  // namespace tesserae::context
