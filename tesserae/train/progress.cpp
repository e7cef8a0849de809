#include "tesserae/train/progress.h"

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "tesserae/base/log.h"
#include "tesserae/os/terminal.h"

namespace tesserae::train {
namespace {

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char buffer[96];
  const int length = std::snprintf(buffer, sizeof buffer, pattern, values...);
  return std::string(buffer, static_cast<size_t>(length));
}

double seconds_between(os::TimePoint from, os::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

std::string short_number(double value) {
  if (value < 1e3) return format("%.0f", value);
  if (value < 1e6) return format("%.1fk", value / 1e3);
  return format("%.1fM", value / 1e6);
}

std::string short_bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value < 1024.0 * 1024 * 1024) return format("%.0f MB", value / (1024.0 * 1024));
  return format("%.1f GB", value / (1024.0 * 1024 * 1024));
}

std::string short_time(double seconds) {
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 3600) return format("%lld:%02lld", whole / 60, whole % 60);
  return format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string progress_line(const StepRecord& record, int64_t steps, uint64_t memory_bytes, double seconds_left) {
  std::string line = cat("step ", record.step, "/", steps, format("  loss %.3f  ", record.loss),
                         short_number(record.tokens_per_second), " tok/s  comm ",
                         format("%.0f%%", record.step_ms > 0 ? 100 * record.comm_ms / record.step_ms : 0), "  ",
                         short_bytes(memory_bytes));
  if (record.disk) {
    line += cat("  disk ", short_bytes(static_cast<uint64_t>(record.disk->read)), " in ",
                short_bytes(static_cast<uint64_t>(record.disk->written)), " out");
  }
  if (record.val_loss) line += format("  val %.3f", *record.val_loss);
  if (seconds_left >= 0) line += "  " + short_time(seconds_left) + " left";
  return line;
}

Progress::Progress(int64_t steps, int64_t log_every)
    : steps_(steps), log_every_(log_every), terminal_(os::is_terminal(os::Stream::output)), begin_(os::now()) {}

void Progress::step(const StepRecord& record, uint64_t memory_bytes) {
  const os::TimePoint now = os::now();
  // The first step pays for buffers and caches: the estimate starts after it.
  if (done_before_ == 0) {
    begin_ = now;
    done_before_ = record.step;
  }
  const auto done = static_cast<double>(record.step - done_before_);
  const auto left = static_cast<double>(steps_ - record.step);
  const double seconds_left = done > 0 && left > 0 ? seconds_between(begin_, now) / done * left : -1;
  const bool last = record.step == steps_;
  if (!terminal_) {
    if (record.step % log_every_ != 0 && record.step != 1 && !last && !record.val_loss) return;
    return write(progress_line(record, steps_, memory_bytes, seconds_left) + "\n");
  }
  // A person reads no more than ten lines a second.
  if (drawn_ && !last && !record.val_loss && seconds_between(last_drawn_, now) < 0.1) return;
  std::string line = progress_line(record, steps_, memory_bytes, seconds_left);
  const auto columns = static_cast<size_t>(os::columns(os::Stream::output));
  if (line.size() >= columns) line.resize(columns - 1);  // a wrapped line could not be drawn over
  write(cat("\r\033[K", line, record.val_loss ? "\n" : ""));
  drawn_ = !record.val_loss;
  last_drawn_ = now;
}

void Progress::say(const std::string& line) {
  clear();
  write(line + "\n");
}

void Progress::clear() {
  if (!drawn_) return;
  write("\r\033[K");
  drawn_ = false;
}

void Progress::write(const std::string& text) {
  if (unread_) return;
  errno = 0;
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  if (errno != EPIPE) return;
  unread_ = true;
  log(LogLevel::warning, "nobody reads standard output any more; training goes on, see the metrics in the run folder");
}

}  // namespace tesserae::train
