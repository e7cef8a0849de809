#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace tesserae::testing {

/// Counts bytes of tensors that are alive, and the most that were.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    alive += static_cast<int64_t>(bytes);
    int64_t seen = peak;
    while (seen < alive && !peak.compare_exchange_weak(seen, alive)) {
    }
    return {memory, new Block{memory, static_cast<int64_t>(bytes)}, &free_block, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static inline std::atomic<int64_t> alive{0}, peak{0};

 private:
  struct Block {
    void* memory;
    int64_t bytes;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    alive -= block->bytes;
    c10::GetDefaultCPUAllocator()->raw_deallocate(block->memory);
  }
};

/// While it lives, tensors on the CPU are counted.
class Counting {
 public:
  Counting() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(&allocator_, 1); }
  ~Counting() { c10::SetCPUAllocator(before_, 1); }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  CountingAllocator allocator_;
  c10::Allocator* before_;
};

}  // namespace tesserae::testing
