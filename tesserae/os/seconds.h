#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "tesserae/os/clock.h"

namespace tesserae::os {

/// Seconds as people and configurations give them; at most three years, which is for ever: what is added to them, or
/// counts them in nanoseconds, would overflow.
inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::clamp(seconds, -1e8, 1e8) * 1e3));
}

inline double seconds_of(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

inline double seconds_since(TimePoint begin) {
  return seconds_of(now() - begin);
}

}  // namespace tesserae::os
