#include "tesserae/monitor/pulse.h"

#include <c10/util/thread_name.h>

#include <utility>

#include "tesserae/os/seconds.h"

namespace tesserae::monitor {
namespace {

constexpr std::chrono::milliseconds tick(50);
constexpr double noticed_stop = 0.2;  // a thread that is only late is no stopped process

}  // namespace

Pulse::Pulse(std::function<void(double seconds)> stopped)
    : stopped_(std::move(stopped)), last_(os::now()), thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Pulse::beat() {
  const std::scoped_lock lock(mutex_);
  const os::TimePoint now = os::now();
  const double late = os::seconds_of(now - std::exchange(last_, now)) - os::seconds_of(tick);
  if (late > noticed_stop) stopped_(late);
}

void Pulse::run(const std::stop_token& stop) {
  c10::setThreadName("tsm-pulse");
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(mutex_);
      ended_.wait_for(lock, stop, tick, [] { return false; });
    }
    beat();
  }
}

}  // namespace tesserae::monitor
