#include "tesserae/probe/measure.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "tesserae/comm/agree.h"
#include "tesserae/os/seconds.h"

namespace tesserae::probe {
namespace {

constexpr int64_t most_repeats = 4096;

/// Of five measurements that begin together, this rank's.
double median_of_windows(comm::Fabric& fabric, const std::function<double()>& measure) {
  std::array<double, 5> seconds{};
  for (double& value : seconds) {
    wait_for_device(fabric);
    fabric.everyone().barrier();
    value = measure();
  }
  std::ranges::sort(seconds);
  return seconds[2];
}

/// Seconds of one call at the mean rate of all ranks.
double mean_of_ranks(comm::Fabric& fabric, double seconds) {
  double rates = 0;
  for (const double own : comm::from_all_ranks(fabric, 1 / seconds)) rates += own;
  return fabric.size() / rates;
}

}  // namespace

double mean_over_ranks(comm::Fabric& fabric, double own) {
  double sum = 0;
  for (const double value : comm::from_all_ranks(fabric, own)) sum += value;
  return sum / fabric.size();
}

void wait_for_device(const comm::Fabric& fabric) {
  if (!fabric.device().is_cpu()) at::accelerator::synchronizeDevice(fabric.device().index());
}

c10::ScalarType scalar_type_of(const std::string& dtype) {
  return dtype == "bf16" ? at::kBFloat16 : dtype == "fp16" ? at::kHalf : at::kFloat;
}

// One by one they would look too fast where ranks share cores: each fits into a time slice that no other rank has. And
// ranks that meet take longer for that than a small product does: what is timed begins behind a barrier and ends by
// each rank's own clock.
double seconds_of(comm::Fabric& fabric, double window, const std::function<void()>& body) {
  body();  // makes what is made once
  const double own = median_of_windows(fabric, [&] {
    const os::TimePoint begin = os::now();
    double passed = 0;
    int64_t done = 0;
    while (passed < window) {
      const int64_t more = std::max<int64_t>(1, done / 4);  // a device has something to do while the host looks
      for (int64_t i = 0; i < more; ++i) body();
      wait_for_device(fabric);
      done += more;
      passed = os::seconds_since(begin);
    }
    return passed / static_cast<double>(done);
  });
  // Ranks on the same cores are slow in turn, for longer than this lasts: together they do as much as ever.
  return fabric.device().is_cpu() ? mean_of_ranks(fabric, own) : comm::max_over_ranks(fabric, own);
}

double seconds_together(comm::Fabric& fabric, double window, const std::function<void()>& body) {
  const auto timed = [&](int64_t repeats) {
    const os::TimePoint begin = os::now();
    for (int64_t i = 0; i < repeats; ++i) body();
    wait_for_device(fabric);
    return os::seconds_since(begin);
  };
  timed(1);
  int64_t repeats = 1;
  for (;;) {
    const double passed = comm::max_over_ranks(fabric, timed(repeats));
    if (passed >= window || repeats >= most_repeats) break;
    const double enough = 1.2 * window / passed * static_cast<double>(repeats);
    repeats = std::clamp(static_cast<int64_t>(enough), 2 * repeats, most_repeats);
  }
  return comm::max_over_ranks(fabric,
                              median_of_windows(fabric, [&] { return timed(repeats) / static_cast<double>(repeats); }));
}

}  // namespace tesserae::probe
