#pragma once

#include <chrono>
#include <vector>

#include "tesserae/os/clock.h"

// What the tests of ranks that end and hang have in common.
namespace tesserae::comm {

// A machine may stand still for seconds, and what then did not come in time is nobody's fault: 4 s were too few. Jobs
// that wait for this one wait side by side.
inline constexpr std::chrono::seconds kDeadline(12);

inline double seconds_now() {
  return std::chrono::duration<double>(os::now().time_since_epoch()).count();
}

inline double first_of(const std::vector<int>& ranks) {
  return ranks.empty() ? -1 : ranks.front();
}

}  // namespace tesserae::comm
