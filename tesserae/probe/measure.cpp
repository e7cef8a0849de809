#include "tesserae/probe/measure.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tesserae/comm/agree.h"
#include "tesserae/os/seconds.h"

namespace tesserae::probe {
namespace {

constexpr double most_repeats = 4096;

/// What was queued has been done.
void wait_for_device(const comm::Fabric& fabric) {
  if (!fabric.device().is_cpu()) at::accelerator::synchronizeDevice(fabric.device().index());
}

}  // namespace

c10::ScalarType scalar_type_of(const std::string& dtype) {
  return dtype == "bf16" ? at::kBFloat16 : dtype == "fp16" ? at::kHalf : at::kFloat;
}

// One by one they would look too fast where ranks share cores: each fits into a time slice that no other rank has.
double seconds_of(comm::Fabric& fabric, double window, const std::function<void()>& body) {
  const auto timed = [&](int64_t repeats) {
    wait_for_device(fabric);
    fabric.everyone().barrier();
    const os::TimePoint begin = os::now();
    for (int64_t i = 0; i < repeats; ++i) body();
    wait_for_device(fabric);
    fabric.everyone().barrier();
    return os::seconds_since(begin) / static_cast<double>(repeats);
  };
  timed(1);  // makes what is made once
  const double once = comm::max_over_ranks(fabric, timed(1));
  const auto repeats = static_cast<int64_t>(std::clamp(std::ceil(window / once), 1.0, most_repeats));
  std::array<double, 3> seconds{};
  for (double& value : seconds) value = timed(repeats);
  std::ranges::sort(seconds);
  return comm::max_over_ranks(fabric, seconds[1]);
}

}  // namespace tesserae::probe
