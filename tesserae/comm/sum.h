#pragma once

#include <ATen/core/Tensor.h>

namespace tesserae::comm {

/// sum += part, element by element, in the tensors' own dtype: a sum over members is rounded once per addition, in the
/// order in which the members are added. Reduce in fp32 where bf16's eight bits are too few (the engine's reduce
/// dtype).
void add_into(const at::Tensor& sum, const at::Tensor& part);

}  // namespace tesserae::comm
