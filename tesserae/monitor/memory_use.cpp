#include "tesserae/monitor/memory_use.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <numeric>

#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/memory.h"

namespace tesserae::monitor {
namespace {

double bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || offload::is_paged(tensor)) return 0;
  return static_cast<double>(tensor.nbytes());
}

}  // namespace

void add(MemoryUse& use, const shard::Engine& engine) {
  for (const shard::FlatBuffer* buffer : engine.buffers()) {
    const shard::FlatParameter& parameter = buffer->parameter();
    const shard::Flat& flat = buffer->flat();
    if (parameter.shared()) {
      const double whole =
          static_cast<double>(flat.total()) * static_cast<double>(c10::elementSize(flat.dtypes().compute));
      use.of(Holds::shared) += whole / buffer->unit().sharding().layout.degrees().parameters;
      if (flat.dtypes().master != flat.dtypes().compute) use.of(Holds::masters) += bytes_of(parameter.local());
    } else {
      use.of(Holds::parameters) += static_cast<double>(parameter.state_bytes());
      use.of(Holds::masters) += bytes_of(parameter.local());
    }
    if (buffer->gradient() != nullptr)
      use.of(Holds::gradients) += static_cast<double>(buffer->gradient()->state_bytes());
  }
  use.of(Holds::buffers) += static_cast<double>(engine.root().context().pool().held_bytes());
}

void complete(MemoryUse& use, c10::Device device, int ranks_of_host, std::optional<double> before) {
  double held = 0;
  if (device.is_cpu()) {
    const os::ProcessMemory process = os::process_memory();
    held = static_cast<double>(process.proportional);
    // The system counts no peak of the proportional set: the pages that others have a part of are those of now.
    const auto of_others = static_cast<double>(process.resident) - held;
    use.peak = std::max(held, static_cast<double>(process.peak_resident) - of_others);
    if (const auto limit = os::group_memory_limit()) use.limit = static_cast<double>(*limit) / ranks_of_host;
  } else {
    const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
    const auto allocated = at::accelerator::getDeviceStats(device.index()).allocated_bytes[0];
    held = static_cast<double>(allocated.current);
    use.peak = static_cast<double>(allocated.peak);
    use.limit = static_cast<double>(total);
  }
  use.of(Holds::program) = use.of(Holds::other) = 0;
  const double known = std::accumulate(use.bytes.begin(), use.bytes.end(), 0.0);
  const double rest = std::max(0.0, held - known);
  use.of(Holds::program) = std::min(before.value_or(rest), rest);
  use.of(Holds::other) = rest - use.of(Holds::program);
}

}  // namespace tesserae::monitor
