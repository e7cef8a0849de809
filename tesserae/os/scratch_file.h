#pragma once

#include <cstddef>
#include <cstdint>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"

namespace tesserae::os {

/// Room on a disk for the life of this process, in a file without a name: nobody else can open it, and the system takes
/// it back however the process ends, kill -9 and power failure included.
///
/// Bypasses the page cache (O_DIRECT) where the file system can: memory, offsets and sizes are multiples of
/// `alignment`. Thread-safe, but for reserve().
class ScratchFile {
 public:
  static constexpr size_t alignment = 4096;

  /// In `folder`, which is made if it is missing. Throws IoError.
  explicit ScratchFile(const Path& folder);

  /// Room for `bytes` more at the end of the file, taken from the disk now; returns its offset. Throws IoError that
  /// names what is asked for and what is free.
  uint64_t reserve(uint64_t bytes);

  /// All of `bytes`. Throw IoError.
  void read(uint64_t offset, void* memory, size_t bytes) const;
  void write(uint64_t offset, const void* memory, size_t bytes) const;

  int descriptor() const { return file_.get(); }
  bool direct() const { return direct_; }  ///< past the page cache
  uint64_t size() const { return size_; }
  const Path& folder() const { return folder_; }

 private:
  Path folder_;
  Descriptor file_;
  bool direct_ = true;
  uint64_t size_ = 0;
};

}  // namespace tesserae::os
