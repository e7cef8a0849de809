#include "cli/live_line.h"

#include <chrono>
#include <cstdio>

#include "cli/checkpoints.h"

namespace tesserae::cli {

LiveLine::~LiveLine() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
}

void LiveLine::update(uint64_t bytes) {
  const os::TimePoint now = os::now();
  if (!terminal_ || (drawn_ && now - last_ < std::chrono::milliseconds(100))) return;
  std::fprintf(stderr, "\r\033[K%s: %s of %s", what_.c_str(), readable_bytes(bytes).c_str(),
               readable_bytes(total_).c_str());
  drawn_ = true;
  last_ = now;
}

}  // namespace tesserae::cli
