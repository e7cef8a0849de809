#include "tesserae/offload/host_blocks.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>

namespace tesserae::offload {
namespace {

constexpr uintptr_t alignment = 64;  // what torch's allocator gives

/// In front of each block lies where malloc's begins.
void*& origin_of(void* block) {
  return static_cast<void**>(block)[-1];
}

void give(void* block) {
  if (block == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(block);
  std::free(origin_of(block));  // NOLINT(cppcoreguidelines-no-malloc)
}

void* take(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t all = bytes + sizeof(void*) + alignment;
  void* const origin = all > bytes ? std::malloc(all) : nullptr;  // NOLINT(cppcoreguidelines-no-malloc)
  if (origin == nullptr) {
    c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    C10_THROW_ERROR(OutOfMemoryError, "cannot allocate " + std::to_string(bytes) + " bytes of host memory");
  }
  const uintptr_t free = reinterpret_cast<uintptr_t>(origin) + sizeof(void*);
  void* const block = reinterpret_cast<void*>((free + alignment - 1) / alignment * alignment);
  origin_of(block) = origin;
  c10::profiledCPUMemoryReporter().New(block, bytes);
  return block;
}

struct HostBlocks : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const block = take(bytes);
    return {block, block, &give, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void use_reusable_host_blocks() {
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator() || std::getenv("THP_MEM_ALLOC_ENABLE") != nullptr) return;
  static HostBlocks blocks;
  c10::SetCPUAllocator(&blocks, /*priority=*/1);
}

}  // namespace tesserae::offload
