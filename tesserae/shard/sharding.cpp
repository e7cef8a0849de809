#include "tesserae/shard/sharding.h"

#include <chrono>
#include <utility>

namespace tesserae::shard {
namespace {

mesh::Degrees degrees_for(int fewer, int ranks, const mesh::Degrees& asked) {
  return mesh::limited(mesh::Layout(ranks, asked).degrees(), fewer);
}

Options with_degrees_for(int fewer, int ranks, Options options) {
  options.strategy.degrees = degrees_for(fewer, ranks, options.strategy.degrees);
  return options;
}

}  // namespace

Sharding::Sharding(std::shared_ptr<comm::Fabric> shared_fabric, const Options& run_options, mesh::AxisSet state_axes)
    : fabric(std::move(shared_fabric)),
      mesh(run_options.mesh != nullptr ? run_options.mesh : std::make_shared<comm::MeshFabric>(fabric)),
      axes(state_axes),
      // The fabric may also be of some ranks only, as a module with a process group of its own has it.
      ranks(fabric->size() * (mesh->degree(mesh::axes::state) / mesh->degree(axes))),
      options(with_degrees_for(fabric->size(), ranks, run_options)),
      layout(fabric->size(), options.strategy.degrees),
      device(fabric->device()),
      state_device(options.offload ? c10::Device(c10::kCPU) : device),
      gather_lane(fabric->lane(comm::Traffic::gather)),
      parameter_group(fabric->group(layout.parameter_group(fabric->rank()), comm::Traffic::gather)),
      refresh_group(fabric->group(layout.refresh_group(fabric->rank()), comm::Traffic::gather)),
      reduce_lane(fabric->lane(comm::Traffic::reduce)),
      gradient_group(fabric->group(layout.gradient_group(fabric->rank()), comm::Traffic::reduce)),
      optimizer_group(fabric->group(layout.optimizer_group(fabric->rank()), comm::Traffic::reduce)),
      replica_group(fabric->group(layout.replica_group(fabric->rank()), comm::Traffic::reduce)) {}

mesh::Degrees Sharding::degrees_here(const mesh::Degrees& asked) const {
  return degrees_for(fabric->size(), ranks, asked);
}

std::shared_ptr<const Sharding> Sharding::with(const mesh::Degrees& asked) const {
  Options next = options;
  next.strategy = mesh::with_degrees(next.strategy, degrees_here(asked));
  next.mesh = mesh;
  return std::make_shared<const Sharding>(fabric, next, axes);
}

std::shared_ptr<const Sharding> Sharding::again() const {
  Options same = options;
  same.mesh = mesh;
  return std::make_shared<const Sharding>(fabric, same, axes);
}

bool allows_reducer(const mesh::Layout& layout) {
  const auto& [parameters, gradients, optimizer] = layout.degrees();
  return parameters == gradients && gradients == optimizer && (optimizer == 1 || optimizer == layout.ranks());
}

void wait_and_count(const comm::Ticket& ticket, double& seconds) {
  if (ticket.ready()) {
    ticket.wait();
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  ticket.wait();
  seconds += std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace tesserae::shard
