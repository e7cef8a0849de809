#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

/// The whole tensor of shape `whole` of which every rank brings its part, padding cut off: the reverse of
/// shard::part_of. New memory, unless there is one rank. Collective over the ranks of `parallel`; no autograd. Throws
/// InvalidArgument for a part that `split` does not make of such a tensor.
at::Tensor whole_of(const at::Tensor& part, const mesh::Split& split, const std::vector<int64_t>& whole,
                    const Parallel& parallel);

}  // namespace tesserae::tensor
