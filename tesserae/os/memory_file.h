#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "tesserae/os/descriptor.h"

namespace tesserae::os {

/// Zeroed memory that processes of one host share and that no name keeps: it is gone with the last process that has it,
/// however that process ends. Move-only.
class MemoryFile {
 public:
  /// `label` is what /proc/PID/maps calls it. Throws IoError.
  static MemoryFile create(const std::string& label, size_t size);
  /// The memory that process `owner`, of the same user, made with this label and has under that descriptor. Throws
  /// IoError: it cannot be seen from here (another host or container), or what is there was not made so.
  static MemoryFile open(pid_t owner, int descriptor, const std::string& label, size_t size);

  ~MemoryFile();
  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&& other) noexcept;

  void* data() const { return data_; }
  size_t size() const { return size_; }
  /// For open(); -1 after close_descriptor().
  int descriptor() const { return descriptor_.get(); }
  /// Nobody else can open it from here on; those who have it keep it.
  void close_descriptor() { descriptor_ = Descriptor(); }

 private:
  MemoryFile(Descriptor descriptor, void* data, size_t size)
      : descriptor_(std::move(descriptor)), data_(data), size_(size) {}

  Descriptor descriptor_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tesserae::os
