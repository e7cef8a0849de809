#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"

namespace tesserae::comm {

/// A rank of a group that was given something else than rank 0.
struct GivenOther {
  int rank = 0;  ///< in the group
  int64_t elements_of_first = 0, elements = 0;
};

/// The first of `group` that was given other `tensors` than its rank 0, by their numbers of elements and sums over
/// their values; nothing: all were given the same. For ranks that compute one batch together: a loader that deals them
/// different ones would go unnoticed. Of any shape, dtype and device. Collective over the group, of `device`.
std::optional<GivenOther> first_given_other(Group& group, c10::Device device, const std::vector<at::Tensor>& tensors);

}  // namespace tesserae::comm
