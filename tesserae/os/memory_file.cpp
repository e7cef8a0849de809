#include "tesserae/os/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "tesserae/os/failure.h"
#include "tesserae/os/files.h"

namespace tesserae::os {
namespace {

void* map_descriptor(std::string_view function, const std::string& name, const Descriptor& descriptor, size_t size) {
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (memory == MAP_FAILED) throw failure(function, name, cat("cannot map ", size, " bytes of shared memory"));
  return memory;
}

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// What the system takes: memfd_create(2). Labels need not be unique.
std::string short_label(const std::string& label) {
  constexpr size_t longest = 249;
  return label.substr(0, longest);
}

std::string target_of(const Path& link) {
  std::error_code failure;
  return std::filesystem::read_symlink(link, failure).native();
}

}  // namespace

MemoryFile MemoryFile::create(const std::string& label, size_t size) {
  constexpr std::string_view function = "MemoryFile::create";
  Descriptor descriptor(::memfd_create(short_label(label).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor) throw failure(function, label, "cannot make a file in memory");
  if (::ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0) {
    throw failure(function, label, cat("cannot make it ", size, " bytes large"));
  }
  if (::fcntl(descriptor.get(), F_ADD_SEALS, seals) != 0) throw failure(function, label, "cannot seal its size");
  void* const memory = map_descriptor(function, label, descriptor, size);
  return {std::move(descriptor), memory, size};
}

// Owner and descriptor came through a store that others may write to, and what is opened is mapped for writing. So it
// must be what create() makes: memory of this user, with this label and of a size that nobody can change.
MemoryFile MemoryFile::open(pid_t owner, int descriptor, const std::string& label, size_t size) {
  constexpr std::string_view function = "MemoryFile::open";
  const std::string path = cat("/proc/", owner, "/fd/", descriptor);
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw failure(function, path, "cannot open the memory of another process");
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0) throw failure(function, path, "cannot stat");
  const std::string expected = cat("/memfd:", short_label(label), " (deleted)");
  const std::string found = target_of(cat("/proc/self/fd/", file.get()));
  const int sealed = ::fcntl(file.get(), F_GET_SEALS);  // -1: it cannot be; the system may have added more
  if (found != expected || facts.st_uid != ::geteuid() || sealed < 0 || (sealed & seals) != seals ||
      facts.st_size != static_cast<off_t>(size)) {
    throw IoError(function, cat(path, ": is ", found, " of ", facts.st_size, " bytes and user ", facts.st_uid, ", not ",
                                expected, " of ", size, ": it is another process's"));
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
