#include "tesserae/os/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "tesserae/os/process.h"

namespace tesserae::os {
namespace {

// Called by number: glibc has a function for it since 2.36 only, the kernel since 5.3.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

}  // namespace

ProcessWatch::ProcessWatch(pid_t process, std::optional<uint64_t> started) : id_(process) {
  Descriptor handle(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  // Read after the handle was made: if it is the expected process now, it was when the handle was made.
  const std::optional<uint64_t> found = start_time(process);
  if (!found || (started && *started != *found)) return;
  started_ = found;
  handle_ = std::move(handle);
}

bool ProcessWatch::gone() const {
  if (!started_) return true;
  if (handle_) return !wait_readable({handle_.get()}, Deadline(std::chrono::nanoseconds(0))).empty();
  return start_time(id_) != started_;
}

bool ProcessWatch::wait_gone(const Deadline& deadline) const {
  if (!started_) return true;
  if (handle_) return !wait_readable({handle_.get()}, deadline).empty();
  while (!gone()) {
    if (deadline.passed()) return false;
    sleep_for(std::min<std::chrono::nanoseconds>(deadline.remaining(), std::chrono::milliseconds(10)));
  }
  return true;
}

}  // namespace tesserae::os
