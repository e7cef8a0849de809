#include "tesserae/train/dial_setup.h"

#include <algorithm>
#include <utility>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/cost/estimate.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/job_facts.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/dial/facts.h"

namespace tesserae::train {
namespace {

/// The optimizer's state in bytes for each byte of a master.
double state_per_master(const config::Config::Optimizer& optimizer) {
  if (optimizer.name == "adamw") return 2;
  return optimizer.momentum > 0 ? 1 : 0;
}

cost::Facts planned_facts(const JobSetup& setup, const config::Config& config, comm::MeshFabric& mesh) {
  comm::Fabric& sharding = *mesh.over(mesh::axes::state);
  const auto bytes = [](std::optional<c10::ScalarType> dtype, c10::ScalarType otherwise) {
    return static_cast<int>(c10::elementSize(dtype.value_or(otherwise)));
  };
  const c10::ScalarType compute = setup.precision.parameters.value_or(setup.model.dtype);
  cost::Facts facts = cost::facts_of(sharding);
  facts.tensor = cost::tensor_ranks_of_host(mesh);
  cost::set_model(facts, setup.model, mesh.degree(mesh::axes::tensor), mesh.degree(mesh::Axis::expert));
  cost::set_options(facts, options_of(config, setup));
  facts.tiers = setup.tiers;
  facts.compute_bytes = bytes(compute, compute);
  facts.reduce_bytes = bytes(setup.precision.reduce, compute);
  facts.master_bytes = bytes(setup.precision.masters, setup.model.dtype);
  facts.state_bytes = state_per_master(config.optimizer) * facts.master_bytes;
  facts.micro_batches = static_cast<int>(config.train.accumulate);
  facts.shared_copy = cost::ranks_can_share(sharding);
  facts.two_levels = cost::goes_in_two_levels(facts);
  return facts;
}

/// At a step's fullest moment, of what does not leave; and the program itself, with what it loads.
double activations_of_rank(const JobSetup& setup, const config::Config& config) {
  constexpr double program = 150e6, on_the_way = 64 << 20;
  const cost::Execution run = execution_of(config, setup);
  const double all = cost::activations_of(setup.model, run).total();
  const double leave = config.offload.activations ? cost::leaving_bytes(setup.model, run, leaving_of(config)) : 0;
  return program + all - std::max(leave - on_the_way, 0.0);
}

}  // namespace

void choose_degrees(JobSetup& setup, const config::Config& config, const std::shared_ptr<comm::Fabric>& fabric,
                    const cost::Links& links) {
  setup.tiers = config.offload.tiers;  // not those of a choice before, which a new rank knows nothing of
  const cost::PlaceMemory place = cost::fullest_place(*fabric);
  comm::MeshFabric mesh(fabric, setup.mesh);
  double total = place.total, free = place.free;
  if (setup.device.is_cpu() && config.offload.memory_limit) {
    total = std::min(total, static_cast<double>(*config.offload.memory_limit));
    free = std::min(free, total);
  }
  std::optional<double> activations;
  // Snapshots keep all of the state in memory.
  if (setup.device.is_cpu() && config.checkpoint.memory_every_steps == 0) {
    const auto here = static_cast<double>(fabric->world().host_ranks(fabric->rank()).size());
    activations = std::ranges::max(comm::from_all_ranks(*fabric, here * activations_of_rank(setup, config)));
  }
  const cost::FirstChoice choice =
      cost::first_choice(planned_facts(setup, config, mesh), links, total, free, config.dial_headroom, activations);
  setup.strategy.degrees = choice.degrees;
  setup.tiers = choice.tiers;
  setup.choice = choice.why;
}

dial::DialOptions dial_options(const config::Config& config, TrainingState& state, const os::Path& run_folder,
                               std::optional<cost::Links> links, std::function<void(const std::string&)> say) {
  dial::DialOptions options;
  for (const auto& [step, degrees] : config::dial_schedule(config.resolved, state.mesh->degree(mesh::axes::state))) {
    options.schedule.push_back({.step = step, .degrees = degrees});
  }
  // The tuner does not know what a disk costs.
  options.automatic = config.sharding.automatic && !state.setting().tiers.uses(offload::Tier::disk);
  options.tuner.headroom = config.dial_headroom;
  options.tuner.planned_steps =
      (config.planned_steps > 0 ? config.planned_steps : config.train.steps) - state.step;  // a resumed job has fewer
  options.facts = dial::facts_of(state.sharded.engine(), state_per_master(config.optimizer),
                                 static_cast<int>(config.train.accumulate));
  options.links = links;
  options.folder = run_folder;
  options.say = std::move(say);
  return options;
}

}  // namespace tesserae::train
