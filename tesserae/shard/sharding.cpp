#include "tesserae/shard/sharding.h"

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/memory.h"

namespace tesserae::shard {
namespace {

mesh::Degrees degrees_for(int fewer, int ranks, const mesh::Degrees& asked) {
  return mesh::limited(mesh::Layout(ranks, asked).degrees(), fewer);
}

Options with_degrees_for(int fewer, int ranks, Options options) {
  options.strategy.degrees = degrees_for(fewer, ranks, options.strategy.degrees);
  return options;
}

std::unique_ptr<comm::Lane> own_lane(const char* name, const Options& options, comm::Fabric& fabric) {
  if (!options.tiers.uses(offload::Tier::disk)) return {};
  if (fabric.lane(comm::Traffic::gather).kind() != comm::Lane::Kind::immediate) return {};
  return std::make_unique<comm::Lane>(name, comm::Lane::Kind::threaded, fabric.device());
}

void require_tiers(const offload::Tiers& tiers, bool has_disk, c10::Device device) {
  const auto away = [](offload::Tier tier) { return tier != offload::Tier::device; };
  if (tiers.uses(offload::Tier::disk) && !has_disk) {
    throw InvalidArgument("Sharding", cat(to_string(tiers), ", but there is no disk; set Options::disk"));
  }
  const bool together =
      away(tiers.parameters) == away(tiers.gradients) && away(tiers.gradients) == away(tiers.optimizer);
  if (!device.is_cpu() && !together) {
    throw InvalidArgument("Sharding", cat(to_string(tiers), ", the rest on ", device.str(),
                                          ": an optimizer step has all it works on in one place; let all three leave "
                                          "the device, or none"));
  }
}

const Options& checked(const Options& options, c10::Device device) {
  require_tiers(options.tiers, options.disk != nullptr, device);
  return options;
}

}  // namespace

Sharding::Sharding(std::shared_ptr<comm::Fabric> shared_fabric, const Options& run_options, mesh::AxisSet state_axes)
    : fabric(std::move(shared_fabric)),
      mesh(run_options.mesh != nullptr ? run_options.mesh : std::make_shared<comm::MeshFabric>(fabric)),
      axes(state_axes),
      // The fabric may also be of some ranks only, as a module with a process group of its own has it.
      ranks(fabric->size() * (mesh->degree(mesh::axes::state) / mesh->degree(axes))),
      options(with_degrees_for(fabric->size(), ranks, checked(run_options, fabric->device()))),
      layout(fabric->size(), options.strategy.degrees),
      device(fabric->device()),
      state_device(options.tiers.optimizer != offload::Tier::device ? c10::Device(c10::kCPU) : device),
      own_gather_lane(own_lane("gather", options, *fabric)),
      own_reduce_lane(own_lane("reduce", options, *fabric)),
      gather_lane(own_gather_lane ? *own_gather_lane : fabric->lane(comm::Traffic::gather)),
      parameter_group(borrow(layout.parameter_group(fabric->rank()), comm::Traffic::gather)),
      refresh_group(borrow(layout.refresh_group(fabric->rank()), comm::Traffic::gather)),
      reduce_lane(own_reduce_lane ? *own_reduce_lane : fabric->lane(comm::Traffic::reduce)),
      gradient_group(borrow(layout.gradient_group(fabric->rank()), comm::Traffic::reduce)),
      optimizer_group(borrow(layout.optimizer_group(fabric->rank()), comm::Traffic::reduce)),
      replica_group(borrow(layout.replica_group(fabric->rank()), comm::Traffic::reduce)) {}

comm::Group& Sharding::borrow(const std::vector<int>& members, comm::Traffic traffic) {
  borrowed.push_back(fabric->borrow(members, traffic));
  return *borrowed.back();
}

at::Tensor Sharding::allocate(int64_t elements, c10::ScalarType dtype, offload::Tier tier, bool travels) const {
  if (tier == offload::Tier::disk) return offload::paged_tensor(options.disk, elements, dtype);
  const bool away = tier == offload::Tier::host && !device.is_cpu();
  if (away && travels) return allocate_pinned(elements, dtype, device);
  return shard::allocate(elements, dtype, away ? c10::Device(c10::kCPU) : device);
}

mesh::Degrees Sharding::degrees_here(const mesh::Degrees& asked) const {
  return degrees_for(fabric->size(), ranks, asked);
}

void Sharding::require_possible(const offload::Tiers& tiers, const std::shared_ptr<offload::Disk>& disk) const {
  require_tiers(tiers, disk != nullptr || options.disk != nullptr, device);
}

std::shared_ptr<const Sharding> Sharding::with(const Setting& asked, std::shared_ptr<offload::Disk> disk) const {
  Options next = options;
  next.strategy = mesh::with_degrees(next.strategy, degrees_here(asked.degrees));
  next.tiers = asked.tiers;
  if (disk != nullptr) next.disk = std::move(disk);
  if (!next.tiers.uses(offload::Tier::disk)) next.disk = nullptr;
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

}  // namespace tesserae::shard
