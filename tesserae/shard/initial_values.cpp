#include "tesserae/shard/initial_values.h"

#include <ATen/ops/empty.h>

#include "tesserae/base/error.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::shard {
namespace {

void require_part_of_this_rank(const Slot& slot, const comm::MeshFabric& mesh) {
  for (const mesh::Split& split : {slot.split.first(), slot.split.second()}) {
    if (split.whole() || (split.parts == mesh.degree(split.axis) && split.index == mesh.index(split.axis))) continue;
    throw InvalidArgument("shard_model",
                          cat("parameter ", slot.names.front(), " is part ", split.index, " of ", split.parts, " over ",
                              to_string(split.axis), ", but this is rank ", mesh.rank(), " of ", to_string(mesh.mesh()),
                              "; pass Options::mesh that the model was built with"));
  }
}

/// What Options::initialize has made of the tensor, or put in its place.
void require_whole(const at::Tensor& values, const Slot& slot) {
  if (values.defined() && !values.is_meta() && values.sizes() == slot.whole) return;
  const std::string what = !values.defined()  ? "no tensor"
                           : values.is_meta() ? "a tensor without values"
                                              : cat("values of shape ", values.sizes());
  throw InvalidArgument("shard_model", cat("Options::initialize left ", what, " for parameter ", slot.names.front(),
                                           " of shape ", at::IntArrayRef(slot.whole)));
}

}  // namespace

at::Tensor initial_values(const Sharding& sharding, const Slot& slot, const at::Tensor& parameter,
                          c10::ScalarType master, bool wanted) {
  const Options& options = sharding.options;
  require_part_of_this_rank(slot, *sharding.mesh);
  at::Tensor values;
  if (parameter.is_meta()) {
    if (!options.initialize) {
      throw InvalidArgument("shard_model", cat("parameter ", slot.names.front(), " is on the meta device and ",
                                               "Options::initialize is not set, so it would have no values"));
    }
    if (!wanted && !options.sync_module_states) return {};
    values = at::empty(slot.whole, at::TensorOptions().dtype(master).device(sharding.device));
    options.initialize(slot.names.front(), values);
    require_whole(values, slot);
    if (!slot.split.whole()) values = tensor::part_of(values, slot.split);
  } else {
    values = parameter.detach().to(sharding.device).contiguous();
  }
  values = slot.flattened(values);
  comm::MeshFabric& mesh = *sharding.mesh;
  const bool repeated = slot.split.along(mesh::Axis::tensor).whole() && mesh.degree(mesh::axes::tensor) > 1;
  if (options.sync_module_states && (repeated || sharding.fabric->size() > 1)) {
    values = values.clone();
    if (repeated) mesh.group(mesh::axes::tensor, comm::Traffic::control).broadcast(values, 0, {slot.names.front()});
    sharding.fabric->everyone().broadcast(values, 0, {slot.names.front()});
  }
  return values;
}

}  // namespace tesserae::shard
