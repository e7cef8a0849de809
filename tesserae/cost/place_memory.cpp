#include "tesserae/cost/place_memory.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>

#include "tesserae/comm/agree.h"
#include "tesserae/os/memory.h"

namespace tesserae::cost {

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
  const auto free = comm::from_all_ranks(fabric, own.free), total = comm::from_all_ranks(fabric, own.total);
  PlaceMemory fullest;
  for (size_t rank = 0; rank < free.size(); ++rank) {
    if (total[rank] <= 0 || (fullest.total > 0 && free[rank] / total[rank] >= fullest.free / fullest.total)) continue;
    fullest.free = free[rank];
    fullest.total = total[rank];
  }
  return fullest;
}

}  // namespace tesserae::cost
