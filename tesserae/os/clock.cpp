#include "tesserae/os/clock.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace tesserae::os {

using std::chrono::nanoseconds;

TimePoint now() {
  return std::chrono::steady_clock::now();
}

void sleep_for(nanoseconds duration) {
  if (duration <= nanoseconds::zero()) return;
  timespec left{.tv_sec = duration.count() / 1'000'000'000, .tv_nsec = duration.count() % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
  }
}

std::string utc_time() {
  const time_t seconds = ::time(nullptr);
  tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  const size_t length = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text, length};
}

Deadline::Deadline(nanoseconds duration) {
  const TimePoint start = now();
  // "For ever" is often written as the largest duration there is.
  end_ = duration > TimePoint::max() - start ? TimePoint::max() : start + duration;
}

nanoseconds Deadline::remaining() const {
  return std::max(nanoseconds::zero(), std::chrono::duration_cast<nanoseconds>(end_ - now()));
}

int Deadline::poll_milliseconds() const {
  const int64_t whole = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
  return static_cast<int>(std::min<int64_t>(whole, INT_MAX));
}

}  // namespace tesserae::os
