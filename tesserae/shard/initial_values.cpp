#include "tesserae/shard/initial_values.h"

#include <ATen/ops/empty.h>

#include "tesserae/base/error.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::shard {
namespace {

void require_tensor_group(const Slot& slot, const comm::Group* group) {
  const int ranks = group == nullptr ? 1 : group->size();
  if (slot.split.whole() || (slot.split.parts == ranks && slot.split.index == group->rank())) return;
  throw InvalidArgument("shard_model",
                        cat("parameter ", slot.names.front(), " is part ", slot.split.index, " of ", slot.split.parts,
                            ", but Options::tensor_group has ", ranks, ranks == 1 ? " rank" : " ranks",
                            "; pass the group of the tensor-parallel ranks that the model was built with"));
}

}  // namespace

at::Tensor initial_values(const Sharding& sharding, const Slot& slot, const at::Tensor& parameter,
                          c10::ScalarType master) {
  const Options& options = sharding.options;
  require_tensor_group(slot, options.tensor_group);
  at::Tensor values;
  if (parameter.is_meta()) {
    if (!options.initialize) {
      throw InvalidArgument("shard_model", cat("parameter ", slot.names.front(), " is on the meta device and ",
                                               "Options::initialize is not set, so it would have no values"));
    }
    values = at::empty(slot.whole, at::TensorOptions().dtype(master).device(sharding.device));
    options.initialize(slot.names.front(), values);
    values = tensor::part_of(values, slot.split);
  } else {
    values = parameter.detach().to(sharding.device).contiguous();
  }
  values = values.view({-1});
  comm::Group* const parallel = options.tensor_group;
  const bool repeated = slot.split.whole() && parallel != nullptr && parallel->size() > 1;
  if (options.sync_module_states && (repeated || sharding.fabric->size() > 1)) {
    values = values.clone();
    if (repeated) parallel->broadcast(values, 0, {slot.names.front()});
    sharding.fabric->everyone().broadcast(values, 0, {slot.names.front()});
  }
  return values;
}

}  // namespace tesserae::shard
