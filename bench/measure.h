#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <vector>

namespace tesserae::bench {

/// Waits until the device has done all that was asked of it; nothing to wait for on a CPU.
inline void synchronize(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeDevice(guard.getDevice().index());
}

/// Wall and CPU time since it was made. CPU time counts all threads of this process.
class Stopwatch {
 public:
  double wall_us() const { return std::chrono::duration<double, std::micro>(Clock::now() - wall_).count(); }
  double cpu_us() const { return static_cast<double>(std::clock() - cpu_) * 1e6 / CLOCKS_PER_SEC; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point wall_ = Clock::now();
  std::clock_t cpu_ = std::clock();
};

/// The middle value, or the mean of the middle two. 0 of nothing.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

}  // namespace tesserae::bench
