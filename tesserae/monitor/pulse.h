#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "tesserae/os/clock.h"

namespace tesserae::monitor {

/// Finds out for how long this process did not run: stopped, frozen, swapped out. Nothing else tells, least of all
/// where the thread that trains was waiting anyway.
///
/// A thread looks at the clock every 50 ms and does nothing else, so that it is never late for a reason of its own; if
/// it is late by 0.2 s, no thread of the process ran.
class Pulse {
 public:
  /// `stopped` is told the seconds of each stop right after it, on the thread that finds out, one stop at a time.
  explicit Pulse(std::function<void(double seconds)> stopped);
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  /// Looks at the clock now: once it returns, `stopped` knows of all that has been. From any thread.
  void beat();

 private:
  void run(const std::stop_token& stop);

  const std::function<void(double)> stopped_;
  std::mutex mutex_;
  std::condition_variable_any ended_;
  os::TimePoint last_;
  std::jthread thread_;  // last: it ends before what it uses
};

}  // namespace tesserae::monitor
