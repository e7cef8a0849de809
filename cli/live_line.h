#pragma once

#include <cstdint>
#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/os/terminal.h"

namespace tesserae::cli {

/// How much of a file was read, in a line on standard error that is drawn anew, where a person looks.
class LiveLine {
 public:
  LiveLine(std::string what, uint64_t total) : what_(std::move(what)), total_(total) {}
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  void update(uint64_t bytes);

 private:
  std::string what_;
  uint64_t total_;
  const bool terminal_ = os::is_terminal(os::Stream::errors);
  bool drawn_ = false;
  os::TimePoint last_;
};

}  // namespace tesserae::cli
