#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tesserae::os {

/// A named piece of memory that processes of one host share. Move-only. Destroying it unmaps; the name stays until
/// remove() (memory is freed when the name is gone and the last process has unmapped).
class SharedMemory {
 public:
  /// A new piece, zeroed. `name` has no slash. The memory is reserved at once: a full /dev/shm is an IoError here, not
  /// a SIGBUS at the first touch. Throws IoError if the name is taken.
  static SharedMemory create(const std::string& name, size_t size);
  /// The piece that another process created, at its size. Throws IoError also where it belongs to another user, or
  /// others may write it: what is in it is not to be trusted.
  static SharedMemory open(const std::string& name);
  /// Takes the name away; those who have it mapped keep it. False if there is none.
  static bool remove(const std::string& name);
  /// The names on this host that begin so, sorted. None where the system does not show them.
  static std::vector<std::string> names(const std::string& prefix);

  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  void* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& name() const { return name_; }

 private:
  SharedMemory(std::string name, void* data, size_t size) : name_(std::move(name)), data_(data), size_(size) {}

  std::string name_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tesserae::os
