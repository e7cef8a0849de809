#include "tesserae/dial/facts.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tesserae/os/memory.h"

namespace tesserae::dial {

Facts facts_of(const comm::Fabric& fabric) {
  Facts facts;
  for (int rank = 0; rank < fabric.size(); ++rank) facts.host_of.push_back(fabric.world().host(rank));
  facts.ranks_share_place = fabric.device().is_cpu();
  return facts;
}

Facts facts_of(shard::Engine& engine, double state_per_master, int micro_batches) {
  const shard::Options& options = engine.context().options;
  Facts facts = facts_of(*engine.context().fabric);
  facts.units = engine.unit_count();
  for (int unit = 0; unit < engine.unit_count(); ++unit) {
    int64_t elements = 0;
    for (int index = 0; index < engine.flats_of(unit); ++index) {
      const shard::Engine::FlatView view = engine.flat_of(unit, index);
      elements += view.flat.parameter_elements();
      facts.compute_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().compute));
      facts.reduce_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().reduce));
      facts.master_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().master));
    }
    facts.parameters += elements;
    (unit == 0 ? facts.root_unit : facts.largest_unit) = unit == 0 ? elements : std::max(facts.largest_unit, elements);
  }
  facts.state_bytes = state_per_master * facts.master_bytes;
  facts.gathers_at_once = options.limit_all_gathers;
  facts.reductions_at_once = options.limit_reductions;
  // A lifetime that never frees because P is 1 frees once P is more: see Engine::reshard.
  const bool never_gathered = options.strategy.degrees.parameters == 1;
  facts.free_after_forward = options.strategy.free_after_forward || never_gathered;
  facts.free_after_backward = options.strategy.free_after_backward || never_gathered;
  facts.micro_batches = micro_batches;
  facts.two_hop = options.accumulation == shard::Accumulation::two_hop;
  return facts;
}

PlaceMemory place_memory(c10::Device device) {
  if (device.is_cpu()) {
    const os::RecentMemory own = os::recent_memory();
    const os::HostMemory host = os::host_memory();
    return {.used = static_cast<double>(own.peak),
            .transient = static_cast<double>(own.peak - std::min(own.peak, own.resident)),
            .free = static_cast<double>(host.available),
            .total = static_cast<double>(host.total)};
  }
  const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
  const auto stats = at::accelerator::getDeviceStats(device.index());
  const auto allocated = stats.allocated_bytes[0], reserved = stats.reserved_bytes[0];
  at::accelerator::resetPeakStats(device.index());
  // What the allocator holds and nobody uses is free, too.
  return {.used = static_cast<double>(allocated.peak),
          .transient = static_cast<double>(allocated.peak - allocated.current),
          .free = static_cast<double>(free) + static_cast<double>(reserved.current - allocated.current),
          .total = static_cast<double>(total)};
}

PlaceMemory fullest_place(comm::Fabric& fabric) {
  const PlaceMemory own = place_memory(fabric.device());
  at::Tensor all = at::zeros({fabric.size(), 2}, at::TensorOptions().dtype(at::kDouble));
  all[fabric.rank()][0] = own.free;
  all[fabric.rank()][1] = own.total;
  at::Tensor shared = all.to(fabric.device());
  fabric.everyone().all_reduce(shared);
  all = shared.cpu();
  const double* values = all.const_data_ptr<double>();
  PlaceMemory fullest;
  for (int rank = 0; rank < fabric.size(); ++rank, values += 2) {
    if (values[1] <= 0 || (fullest.total > 0 && values[0] / values[1] >= fullest.free / fullest.total)) continue;
    fullest.free = values[0];
    fullest.total = values[1];
  }
  return fullest;
}

}  // namespace tesserae::dial
