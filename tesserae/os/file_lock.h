#pragma once

#include <optional>
#include <utility>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"

namespace tesserae::os {

/// An exclusive lock on a file while it lives. The system gives it back when the process ends, however it ends, so none
/// is ever left behind. It reaches other hosts where the file system carries locks between them (NFS 4, GPFS, Lustre
/// with `flock`). Move-only.
class FileLock {
 public:
  /// Makes the file if it is missing; it stays. None if another lock is alive. Throws IoError where the file cannot be
  /// opened, or where its file system has no locks.
  static std::optional<FileLock> try_lock(const Path& path);

 private:
  explicit FileLock(Descriptor file) : file_(std::move(file)) {}

  Descriptor file_;
};

}  // namespace tesserae::os
