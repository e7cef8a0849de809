#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "tesserae/os/descriptor.h"

namespace tesserae::os {

/// Linux's io_uring: reads and writes that the kernel does beside the caller, no thread for each. One thread may call
/// submit() while another is in wait().
class Uring {
 public:
  /// Nothing where the system has none or forbids it (containers often do).
  static std::optional<Uring> make(unsigned entries);
  ~Uring();
  Uring(Uring&& other) noexcept;
  Uring& operator=(Uring&&) = delete;

  enum class Operation { read, write, nothing };

  /// At most `entries` are under way at once, which the caller sees to. `tag` comes back with the completion. Throws
  /// IoError.
  void submit(Operation operation, int descriptor, uint64_t offset, void* memory, size_t bytes, uint64_t tag);

  struct Completion {
    uint64_t tag = 0;
    int result = 0;  ///< bytes, or -errno
  };
  /// The next one; waits for it.
  Completion wait();

 private:
  struct Rings;
  Uring(Descriptor descriptor, Rings* rings) : descriptor_(std::move(descriptor)), rings_(rings) {}

  Descriptor descriptor_;
  Rings* rings_;
};

}  // namespace tesserae::os
