#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tesserae/base/error.h"

namespace tesserae::autograd {

/// For the backward of a node that sends: who differentiates twice (create_graph) would silently leave out the other
/// ranks. Throws InvalidArgument then; `who`: subject and verb, "functions of split tensors have".
inline void require_first_derivative(const char* who) {
  if (at::GradMode::is_enabled()) {
    throw InvalidArgument("backward", cat(who, " first derivatives only (create_graph is set)"));
  }
}

/// Keeps what a node was called with, besides tensors: a torch::CustomClassHolder.
template <class Call>
void keep(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Call>& call) {
  context->saved_data["call"] = c10::IValue::make_capsule(call);
}

/// The same in its backward; see require_first_derivative.
template <class Call>
c10::intrusive_ptr<Call> kept(torch::autograd::AutogradContext* context, const char* who) {
  require_first_derivative(who);
  return c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
}

}  // namespace tesserae::autograd
