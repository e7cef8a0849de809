#pragma once

#include <cstdint>
#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/train/metrics.h"

namespace tesserae::train {

/// "step 120/400  loss 2.412  18.4k tok/s  comm 12%  1.2 GB  1:32 left". `seconds_left` < 0: not known yet.
std::string progress_line(const StepRecord& record, int64_t steps, uint64_t memory_bytes, double seconds_left);

/// 950 as "950", 18'400 as "18.4k", 2'300'000 as "2.3M".
std::string short_number(double value);
/// 1'288'490'188 as "1.2 GB" (powers of 1024).
std::string short_bytes(uint64_t bytes);
/// 92 s as "1:32", 7384 s as "2:03:04".
std::string short_time(double seconds);

/// What a person sees of a run: on a terminal one line that is drawn anew, elsewhere a line every `log_every` steps and
/// at the last one. Writes to standard output; only rank 0 has one. Once nobody reads that any more (`| head` has seen
/// enough) it says so in the log, once, and is silent: a run does not end with its reader. The process must not end of
/// SIGPIPE (os::survive_broken_pipes).
class Progress {
 public:
  Progress(int64_t steps, int64_t log_every);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepRecord& record, uint64_t memory_bytes);
  /// A line that stays on the screen.
  void say(const std::string& line);
  /// Takes the live line away.
  void clear();

 private:
  void write(const std::string& text);

  int64_t steps_;
  int64_t log_every_;
  bool terminal_;
  bool drawn_ = false;
  bool unread_ = false;
  os::TimePoint begin_, last_drawn_;
  int64_t done_before_ = 0;
};

}  // namespace tesserae::train
