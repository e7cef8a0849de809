#include "tesserae/cost/place_memory.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

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

}  // namespace tesserae::cost
