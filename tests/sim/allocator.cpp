#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/sim/device.h"
#include "tests/sim/operation.h"

namespace tesserae::sim {
namespace {

void give_back(void* address) {
  for (c10::DeviceIndex index = 0; index < device_count; ++index) {
    Device* const device = Device::find(index);
    if (device && device->memory().holds(address)) return device->memory().free(address);
  }
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    if (bytes == 0) return {nullptr, device(index)};
    void* const address = Device::at(index).memory().allocate(bytes, current_stream(index));
    return {address, address, &give_back, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  // On the current stream of the device, as all that is enqueued.
  void copy_data(void* to, const void* from, size_t count) const override {
    auto& here = Device::at(current_device());
    here.current_stream().enqueue("a copy of an allocation",
                                  [to = here.memory().for_tasks(to), from = here.memory().for_tasks(from), count] {
                                    std::memcpy(to, from, count);
                                  });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (c10::DeviceIndex index = 0; index < device_count; ++index) {
      Device* const device = Device::find(index);
      if (!device) continue;
      device->synchronize();  // as cudaFree does
      device->memory().forget_streams();
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get()) return;
    Device::at(pointer.device().index()).memory().record_stream(pointer.get(), stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Memory& memory = Device::at(index).memory();
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* const bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
      auto& all = (*bytes)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(memory.used_bytes());
      all.peak = static_cast<int64_t>(memory.peak_bytes());
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex index) override { Device::at(index).memory().reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {Memory::capacity - Device::at(index).memory().used_bytes(), Memory::capacity};
  }
};

// Host memory that copies run from and to without staging. It begins as NaN, so that the host that reads before a copy
// has come sees it. Copies keep the memory alive themselves (natives.cpp): there are no events to record.
class PinnedMemory final : public at::HostAllocator {
 public:
  static PinnedMemory& get() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    constexpr size_t page = 4096;
    const size_t size = std::max(page, std::bit_ceil(bytes));
    void* const address = std::aligned_alloc(page, size);
    TORCH_CHECK_WITH(OutOfMemoryError, address, "[sim] there are no ", size, " bytes of host memory to pin");
    std::memset(address, 0xff, size);
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<const char*>(address)] = size;
    return {address, address, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  bool record_event(void* /*address*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  size_t taken() const {
    const std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const auto& [address, size] : blocks_) sum += size;
    return sum;
  }
  bool holds(const void* address) const {
    const char* const byte = static_cast<const char*>(address);
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(byte);
    return after != blocks_.begin() && byte < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void release(void* address) {
    auto& memory = get();
    const std::lock_guard lock(memory.mutex_);
    memory.blocks_.erase(static_cast<const char*>(address));
    std::free(address);
  }

  mutable std::mutex mutex_;
  std::map<const char*, size_t> blocks_;
};

}  // namespace

void install_allocators() {
  c10::SetAllocator(c10::kPrivateUse1, new DeviceMemory);
  at::setHostAllocator(c10::kPrivateUse1, &PinnedMemory::get());
}

bool is_pinned(const void* address) {
  return PinnedMemory::get().holds(address);
}

size_t pinned_bytes() {
  return PinnedMemory::get().taken();
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = c10::GetAllocator(c10::kPrivateUse1)->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0 && storage.data()) c10::GetAllocator(c10::kPrivateUse1)->copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace tesserae::sim
