#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"

namespace tesserae::os {

/// Tells when a process of this host has ended, child or not. A process that has ended stays gone, though its id is
/// used again. Move-only; gone() may be called from any thread.
class ProcessWatch {
 public:
  /// Watches `process`; with `started` (start_time() as that process saw it) a later process of the same id counts as
  /// gone.
  explicit ProcessWatch(pid_t process, std::optional<uint64_t> started = std::nullopt);

  pid_t id() const { return id_; }
  /// True once it has ended, reaped by its parent or not. Never blocks.
  bool gone() const;
  /// Waits for its end. False: the deadline passed.
  bool wait_gone(const Deadline& deadline) const;
  /// Readable once the process has ended: for wait_readable. -1 if it is gone already, or where the kernel has no
  /// pidfd.
  int descriptor() const { return handle_.get(); }

 private:
  pid_t id_;
  std::optional<uint64_t> started_;  ///< nothing: there was no such process
  Descriptor handle_;
};

}  // namespace tesserae::os
