#pragma once

#include "tesserae/autograd/node.h"
#include "tesserae/tensor/functions.h"

namespace tesserae::tensor {

/// What an autograd node of this layer keeps besides tensors: among whom, and along which dimension.
struct Kept : torch::CustomClassHolder {
  Kept(ParallelPtr among, int64_t along) : parallel(std::move(among)), dim(along) {}

  ParallelPtr parallel;
  int64_t dim;
};

inline void keep(torch::autograd::AutogradContext* context, const ParallelPtr& parallel, int64_t dim = 0) {
  autograd::keep(context, c10::make_intrusive<Kept>(parallel, dim));
}

inline c10::intrusive_ptr<Kept> kept(torch::autograd::AutogradContext* context) {
  return autograd::kept<Kept>(context, "functions of split tensors have");
}

}  // namespace tesserae::tensor
