#include "tesserae/os/reserved_pages.h"

#include <sys/mman.h>

#include <cstdint>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

constexpr size_t huge = size_t{2} << 20;

}  // namespace

void* reserve_pages(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const start = ::mmap(nullptr, bytes + huge, PROT_NONE, flags, -1, 0);
  if (start == MAP_FAILED) throw failure("reserve_pages", cat(bytes, " bytes of addresses"), "mmap");
  auto* const first = static_cast<char*>(start);
  const size_t skipped = (huge - reinterpret_cast<uintptr_t>(first) % huge) % huge;
  if (skipped > 0) ::munmap(first, skipped);
  if (skipped < huge) ::munmap(first + skipped + bytes, huge - skipped);
#ifdef MADV_HUGEPAGE
  ::madvise(first + skipped, bytes, MADV_HUGEPAGE);  // advice: refused is as good as ignored
#endif
#ifdef MADV_DONTFORK
  ::madvise(first + skipped, bytes, MADV_DONTFORK);  // a child must neither copy nor share what is being transferred
#endif
  return first + skipped;
}

void unreserve_pages(void* memory, size_t bytes) noexcept {
  ::munmap(memory, bytes);
}

void open_pages(void* memory, size_t bytes) {
  if (::mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) {
    throw failure("open_pages", cat(bytes, " bytes"), "mprotect");
  }
}

void close_pages(void* memory, size_t bytes) noexcept {
  ::madvise(memory, bytes, MADV_DONTNEED);
  ::mprotect(memory, bytes, PROT_NONE);
}

}  // namespace tesserae::os
