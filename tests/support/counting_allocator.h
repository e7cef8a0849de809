#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace tesserae::testing {

/// Counts bytes of tensors that are alive, and the most that were.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    char* const memory = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(bytes + header));
    const auto size = static_cast<int64_t>(bytes);
    std::memcpy(memory, &size, sizeof size);
    alive += size;
    int64_t seen = peak;
    while (seen < alive && !peak.compare_exchange_weak(seen, alive)) {
    }
    void* const data = memory + header;
    return {data, data, &free_block, c10::kCPU};  // kernels that want plain memory expect both to be the same
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  static inline std::atomic<int64_t> alive{0}, peak{0};

 private:
  static constexpr size_t header = 64;  // before each block: its size; as large as tensors are aligned

  static void free_block(void* data) {
    char* const memory = static_cast<char*>(data) - header;
    int64_t size = 0;
    std::memcpy(&size, memory, sizeof size);
    alive -= size;
    c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
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
