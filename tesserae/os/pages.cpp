#include "tesserae/os/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "tesserae/base/error.h"

namespace tesserae::os {
namespace {

constexpr size_t huge_page = size_t{2} << 20;  // where it is larger, the advice is merely of no use

size_t round_to(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

size_t mapped_bytes(size_t bytes) {
  return round_to(bytes, static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
}

}  // namespace

void* map_pages(size_t bytes) {
  const size_t size = mapped_bytes(bytes);
  void* const start = ::mmap(nullptr, size + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw OutOfMemory("map_pages", cat("cannot allocate ", size, " bytes of host memory"));
  // Begins on a huge page; what is before and behind goes back.
  auto* const first = static_cast<char*>(start);
  const size_t skipped = round_to(reinterpret_cast<uintptr_t>(first), huge_page) - reinterpret_cast<uintptr_t>(first);
  if (skipped > 0) ::munmap(first, skipped);
  if (skipped < huge_page) ::munmap(first + skipped + size, huge_page - skipped);
#ifdef MADV_HUGEPAGE
  ::madvise(first + skipped, size, MADV_HUGEPAGE);  // advice: refused is as good as ignored
#endif
  return first + skipped;
}

void unmap_pages(void* memory, size_t bytes) noexcept {
  ::munmap(memory, mapped_bytes(bytes));
}

}  // namespace tesserae::os
