#include "tesserae/os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"
#include "tesserae/os/files.h"

namespace tesserae::os {
namespace {

std::string system_name(std::string_view function, const std::string& name) {
  if (!name.empty() && name.find('/') == std::string::npos) return "/" + name;
  throw InvalidArgument(function, cat("'", name, "' cannot name shared memory: it must not be empty or have a slash"));
}

void* map(std::string_view function, const std::string& name, const Descriptor& descriptor, size_t size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (memory == MAP_FAILED) throw failure(function, name, cat("cannot map ", size, " bytes of shared memory"));
  return memory;
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& name, size_t size) {
  constexpr std::string_view function = "SharedMemory::create";
  if (size == 0) throw InvalidArgument(function, cat(name, ": shared memory cannot be empty"));
  const std::string path = system_name(function, name);
  const Descriptor descriptor(::shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!descriptor) throw failure(function, name, "cannot create shared memory");
  try {
    int error;
    do {
      error = ::posix_fallocate(descriptor.get(), 0, static_cast<off_t>(size));
    } while (error == EINTR);
    if (error != 0) throw failure(function, name, cat("cannot reserve ", size, " bytes in /dev/shm"), error);
    return {name, map(function, name, descriptor, size), size};
  } catch (...) {
    ::shm_unlink(path.c_str());
    throw;
  }
}

SharedMemory SharedMemory::open(const std::string& name) {
  constexpr std::string_view function = "SharedMemory::open";
  const Descriptor descriptor(::shm_open(system_name(function, name).c_str(), O_RDWR | O_CLOEXEC, 0600));
  if (!descriptor) throw failure(function, name, "cannot open shared memory");
  struct stat facts {};
  if (::fstat(descriptor.get(), &facts) != 0) throw failure(function, name, "cannot stat shared memory");
  if (facts.st_uid != ::geteuid() || (facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw IoError(function, cat(name, ": belongs to user ", facts.st_uid, " with mode 0", std::oct,
                                facts.st_mode & 0777, ", not to this user alone; it is not used"));
  }
  const size_t size = static_cast<size_t>(facts.st_size);
  if (size == 0) throw IoError(function, cat(name, ": its creator has not given it a size yet; open it later"));
  return {name, map(function, name, descriptor, size), size};
}

bool SharedMemory::remove(const std::string& name) {
  if (::shm_unlink(system_name("SharedMemory::remove", name).c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  throw failure("SharedMemory::remove", name, "cannot remove shared memory");
}

std::vector<std::string> SharedMemory::names(const std::string& prefix) {
  const Path folder = "/dev/shm";  // Linux shows shared memory as files there
  std::vector<std::string> found;
  if (files().status(folder).kind != FileKind::directory) return found;
  for (std::string& name : files().list(folder)) {
    if (name.starts_with(prefix)) found.push_back(std::move(name));
  }
  return found;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::move(other.name_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace tesserae::os
