#include "tesserae/train/stop_request.h"

#include <chrono>
#include <cstdlib>

#include "tesserae/os/clock.h"

namespace tesserae::train {

StopRequest::StopRequest() : watcher_([this](const std::stop_token& stop) { watch(stop); }) {}

void StopRequest::watch(const std::stop_token& stop) const {
  while (!stop.stop_requested()) {
    if (signals_.count() > 1) std::_Exit(128 + signals_.first());
    os::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace tesserae::train
