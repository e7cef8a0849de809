#include "tesserae/os/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

void* map_descriptor(std::string_view function, const std::string& name, const Descriptor& descriptor, size_t size) {
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (memory == MAP_FAILED) throw failure(function, name, cat("cannot map ", size, " bytes of shared memory"));
  return memory;
}

}  // namespace

MemoryFile MemoryFile::create(const std::string& label, size_t size) {
  constexpr std::string_view function = "MemoryFile::create";
  constexpr size_t longest_label = 249;  // memfd_create(2); labels need not be unique
  Descriptor descriptor(::memfd_create(label.substr(0, longest_label).c_str(), MFD_CLOEXEC));
  if (!descriptor) throw failure(function, label, "cannot make a file in memory");
  if (::ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0) {
    throw failure(function, label, cat("cannot make it ", size, " bytes large"));
  }
  void* const memory = map_descriptor(function, label, descriptor, size);
  return {std::move(descriptor), memory, size};
}

MemoryFile MemoryFile::open(pid_t owner, int descriptor, size_t size) {
  constexpr std::string_view function = "MemoryFile::open";
  const std::string path = cat("/proc/", owner, "/fd/", descriptor);
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw failure(function, path, "cannot open the memory of another process");
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0) throw failure(function, path, "cannot stat");
  if (facts.st_size != static_cast<off_t>(size)) {
    throw IoError(function, cat(path, ": has ", facts.st_size, " bytes, not ", size, ": it is another process's"));
  }
  return {Descriptor(), map_descriptor(function, path, file, size), size};
}

MemoryFile::~MemoryFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MemoryFile& MemoryFile::operator=(MemoryFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace tesserae::os
