#pragma once

#include <ATen/core/Tensor.h>

#include "tesserae/shard/flat.h"
#include "tesserae/shard/sharding.h"

namespace tesserae::shard {

/// The values that a slot's parameter starts with: [slot.elements], on the device. A parameter on the meta device is
/// filled by Options::initialize; with Options::sync_module_states all ranks get rank 0's, and the call is collective.
/// Throws InvalidArgument for a part that the tensor-parallel ranks of the options do not make, and for a parameter
/// that nothing fills. `master`: the dtype to fill in. `wanted`: false where this rank holds nothing of them: if nobody
/// else needs them either, they are not made, and what is returned is undefined.
at::Tensor initial_values(const Sharding& sharding, const Slot& slot, const at::Tensor& parameter,
                          c10::ScalarType master, bool wanted);

}  // namespace tesserae::shard
