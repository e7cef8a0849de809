#include "tesserae/shard/sharding.h"

#include <chrono>
#include <utility>

namespace tesserae::shard {

Sharding::Sharding(std::shared_ptr<comm::Fabric> shared_fabric, const Options& run_options)
    : fabric(std::move(shared_fabric)),
      mesh(run_options.mesh != nullptr ? run_options.mesh : std::make_shared<comm::MeshFabric>(fabric)),
      options(run_options),
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
