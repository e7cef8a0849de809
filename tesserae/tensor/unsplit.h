#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "tesserae/autograd/tied_gradient.h"
#include "tesserae/tensor/product.h"

namespace tesserae::tensor {

// Layers whose weights are not split, with torch's numbers, for models that call torch's own layers. What torch's do
// not: the gradient of the weight is computed where it will be reduced (autograd::gradient_destination), if that place
// is to be had. Where somebody else is to see the operators (dispatch modes, tracing, functorch, forward mode), where
// arguments are no plain tensors, and under autocast, they are torch's functions. Second derivatives work. On the
// thread that computes; errors are torch's.

/// y = x W^T + b: x [..., in], weight [out, in], bias [out] or none; y [..., out]. `widened`: bf16 and fp16 as
/// product() multiplies them, with or without gradients; on a CPU only.
at::Tensor unsplit_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          Products products = Products::as_torch);

/// The rows of `weight` [vocabulary, dimension] that `tokens` (int64) name: [shape of tokens, dimension]. Row
/// `padding_index`, if there is one (not negative), has no gradient. `tied`: another node uses the weight, too.
at::Tensor unsplit_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t padding_index = -1,
                             const autograd::TiedGradientPtr& tied = {});

}  // namespace tesserae::tensor
