#pragma once

#include "tesserae/autograd/node.h"

namespace tesserae::context {

using autograd::keep;

template <class Call>
c10::intrusive_ptr<Call> kept(torch::autograd::AutogradContext* context) {
  return autograd::kept<Call>(context, "functions of cut sequences have");
}

}  // namespace tesserae::context
