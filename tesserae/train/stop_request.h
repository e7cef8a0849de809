#pragma once

#include <thread>

#include "tesserae/os/signals.h"

namespace tesserae::train {

/// While it lives, the first SIGINT, SIGTERM or SIGUSR1 asks for an orderly end. A second SIGINT or SIGTERM ends the
/// process at once, in whatever operation it is; SIGUSR1 is a cluster manager's warning, after which its SIGTERM is the
/// first. Signals within half a second are the same request: a launcher and a cluster manager may both pass it on. At
/// most one at a time.
class StopRequest {
 public:
  StopRequest();

  /// The signal that asked, or 0.
  int signal() const { return signals_.first(); }

 private:
  void watch(const std::stop_token& stop) const;

  os::StopSignals signals_;
  std::jthread watcher_;  // last: it ends before the signals do
};

}  // namespace tesserae::train
