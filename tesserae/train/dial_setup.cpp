#include "tesserae/train/dial_setup.h"

#include <algorithm>
#include <utility>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/cost/estimate.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/dial/facts.h"

namespace tesserae::train {
namespace {

/// How many ranks of a tensor group are on the same host.
int tensor_ranks_of_host(const comm::MeshFabric& mesh) {
  const mesh::World& world = mesh.job()->world();
  const std::vector<int> first = mesh.mesh().members(mesh::axes::tensor, 0);  // the same on all ranks
  return static_cast<int>(std::ranges::count_if(first, [&](int rank) { return world.host(rank) == world.host(0); }));
}

/// The optimizer's state in bytes for each byte of a master.
double state_per_master(const config::Config::Optimizer& optimizer) {
  if (optimizer.name == "adamw") return 2;
  return optimizer.momentum > 0 ? 1 : 0;
}

cost::Facts planned_facts(const Plan& plan, const config::Config& config, comm::MeshFabric& mesh) {
  comm::Fabric& sharding = *mesh.over(mesh::axes::state);
  const int tensor = mesh.degree(mesh::axes::tensor);
  const model::GptSizes sizes = model::sizes(plan.model);
  const auto bytes = [](std::optional<c10::ScalarType> dtype, c10::ScalarType otherwise) {
    return static_cast<int>(c10::elementSize(dtype.value_or(otherwise)));
  };
  const c10::ScalarType compute = plan.precision.parameters.value_or(plan.model.dtype);
  cost::Facts facts = cost::facts_of(sharding);
  facts.tensor = tensor_ranks_of_host(mesh);
  facts.parameters = sizes.total / tensor;  // but for norms, of which each rank has all
  facts.root_unit = sizes.root / tensor;
  facts.largest_unit = std::max(sizes.block, sizes.head) / tensor;
  facts.units = static_cast<int>(plan.model.layers) + (sizes.head > 0 ? 2 : 1);
  facts.compute_bytes = bytes(compute, compute);
  facts.reduce_bytes = bytes(plan.precision.reduce, compute);
  facts.master_bytes = bytes(plan.precision.masters, plan.model.dtype);
  facts.state_bytes = state_per_master(config.optimizer) * facts.master_bytes;
  facts.gathers_at_once = config.sharding.limit_all_gathers;
  facts.reductions_at_once = config.sharding.limit_reductions;
  facts.free_after_forward = plan.strategy.free_after_forward;
  facts.free_after_backward = plan.strategy.free_after_backward;
  facts.micro_batches = static_cast<int>(config.train.accumulate);
  facts.two_hop = config.train.accumulation == shard::Accumulation::two_hop;
  facts.shared_copy = cost::ranks_can_share(sharding);
  facts.two_levels = cost::goes_in_two_levels(facts);
  return facts;
}

}  // namespace

void choose_degrees(Plan& plan, const config::Config& config, const std::shared_ptr<comm::Fabric>& fabric,
                    const cost::Links& links) {
  const cost::PlaceMemory place = cost::fullest_place(*fabric);
  comm::MeshFabric mesh(fabric, plan.mesh);
  const cost::FirstChoice choice =
      cost::first_choice(planned_facts(plan, config, mesh), links, place.total, place.free, config.dial_headroom);
  plan.strategy.degrees = choice.degrees;
  plan.choice = choice.why;
}

dial::DialOptions dial_options(const config::Config& config, TrainingState& state, const os::Path& run_folder,
                               std::optional<cost::Links> links, std::function<void(const std::string&)> say) {
  dial::DialOptions options;
  for (const auto& [step, degrees] : config::dial_schedule(config.resolved, state.mesh->degree(mesh::axes::state))) {
    options.schedule.push_back({.step = step, .degrees = degrees});
  }
  options.automatic = config.sharding.automatic;
  options.tuner.headroom = config.dial_headroom;
  options.tuner.planned_steps =
      (config.planned_steps > 0 ? config.planned_steps : config.train.steps) - state.step;  // a resumed job has fewer
  options.facts = dial::facts_of(state.sharded.engine(), state_per_master(config.optimizer),
                                 static_cast<int>(config.train.accumulate));
  options.facts.tensor = tensor_ranks_of_host(*state.mesh);
  options.links = links;
  options.folder = run_folder;
  options.say = std::move(say);
  return options;
}

}  // namespace tesserae::train
