#include "tesserae/train/stop_request.h"

#include <chrono>
#include <cstdlib>

#include "tesserae/os/clock.h"

namespace tesserae::train {
namespace {

constexpr std::chrono::milliseconds poll_interval(50);
constexpr std::chrono::milliseconds same_request(500);

}  // namespace

StopRequest::StopRequest() : watcher_([this](const std::stop_token& stop) { watch(stop); }) {}

void StopRequest::watch(const std::stop_token& stop) const {
  const auto wait_while = [&](const auto& condition) {
    while (!stop.stop_requested() && condition()) os::sleep_for(poll_interval);
  };
  wait_while([this] { return signals_.demands() == 0; });
  const os::Deadline settled(same_request);
  wait_while([&] { return !settled.passed(); });
  const int requests = signals_.demands();
  wait_while([&] { return signals_.demands() == requests; });
  if (!stop.stop_requested()) std::_Exit(128 + signals_.first());
}

}  // namespace tesserae::train
