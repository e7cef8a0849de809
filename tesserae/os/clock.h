#pragma once

#include <chrono>
#include <string>

namespace tesserae::os {

using TimePoint = std::chrono::steady_clock::time_point;

/// The monotonic clock: never set back, the same for every process of the host.
TimePoint now();

/// Sleeps for all of `duration`, whatever signals arrive.
void sleep_for(std::chrono::nanoseconds duration);

/// The wall clock as "2026-03-01T12:34:56Z", for names and logs only: it may be set back.
std::string utc_time();

/// A point in time by which something must be done. Every blocking call of this project has one.
class Deadline {
 public:
  explicit Deadline(std::chrono::nanoseconds duration);

  bool passed() const { return remaining().count() == 0; }
  std::chrono::nanoseconds remaining() const;  ///< never negative
  /// remaining() in whole milliseconds as poll(2) wants it: rounded up, so that a caller does not spin at the end.
  int poll_milliseconds() const;

 private:
  TimePoint end_;
};

}  // namespace tesserae::os
