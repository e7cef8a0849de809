#include "tesserae/shard/pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <tuple>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/shard/memory.h"

namespace tesserae::shard {

Pool::Buffer Pool::add(int64_t bytes, const void* owner) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), c10::DataPtr(nullptr, device_),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_));
  tensor.set_(std::move(storage), 0, {bytes}, {1});
  slots_.push_back({std::move(tensor), bytes, owner, /*taken=*/false, /*held=*/false});
  if (!elastic_) hold(slots_.back());
  reserved_bytes_ += bytes;
  return static_cast<Buffer>(slots_.size()) - 1;
}

// Views share the storage, so they follow it to the memory that it is given.
void Pool::hold(Slot& slot) {
  if (slot.held) return;
  slot.bytes.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(allocate(slot.size, device_));
  slot.held = true;
}

void Pool::drop(Slot& slot) {
  if (!slot.held) return;
  slot.bytes.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  slot.held = false;
}

void Pool::reserve(int64_t bytes, int count, const void* owner) {
  for (int i = 0; i < count; ++i) add(bytes, owner);
}

Pool::Buffer Pool::acquire(int64_t bytes, const void* owner) {
  Buffer best = -1;
  // Its own first, then the smallest, then one that has memory.
  const auto order = [](const Slot& slot) { return std::tuple(slot.owner == nullptr, slot.size, !slot.held); };
  for (Buffer i = 0; i < static_cast<Buffer>(slots_.size()); ++i) {
    const Slot& slot = slots_[i];
    if (slot.taken || slot.size < bytes || (slot.owner != nullptr && slot.owner != owner)) continue;
    if (best < 0 || order(slot) < order(slots_[best])) best = i;
  }
  if (best < 0) {
    best = add(bytes, nullptr);
    ++misses_;
    log(LogLevel::info, cat("pool: no free buffer of ", bytes, " bytes; allocated one (miss ", misses_, ")"));
  }
  slots_[best].taken = true;
  hold(slots_[best]);
  return best;
}

void Pool::release(Buffer buffer, bool keep) {
  slots_[buffer].taken = false;
  if (elastic_ && !keep) drop(slots_[buffer]);
}

void Pool::give_back() {
  if (!elastic_) return;
  for (Slot& slot : slots_) {
    if (!slot.taken) drop(slot);
  }
}

int64_t Pool::held_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.held ? slot.size : 0;
  return bytes;
}

at::Tensor Pool::view(Buffer buffer, int64_t elements, c10::ScalarType dtype) const {
  const auto& bytes = slots_[buffer].bytes;
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, elements * size).view(dtype);
}

}  // namespace tesserae::shard
