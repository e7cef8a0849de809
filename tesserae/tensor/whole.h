#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/mesh/split.h"

namespace tesserae::tensor {

/// The whole tensor of shape `whole` of which every member brings its part, padding cut off: the reverse of part_of.
/// New memory, unless there is one member. `group`: the tensor-parallel ranks, by tensor index. Collective over it; no
/// autograd. Throws InvalidArgument for a part that `split` does not make of such a tensor.
at::Tensor whole_of(const at::Tensor& part, const mesh::Split& split, const std::vector<int64_t>& whole,
                    comm::Group& group);

/// The same for a tensor that is split over axes of a mesh. Collective over the ranks of these axes.
at::Tensor whole_of(const at::Tensor& part, const mesh::Splits& splits, const std::vector<int64_t>& whole,
                    comm::MeshFabric& mesh);

}  // namespace tesserae::tensor
