#include "tesserae/shard/pool.h"

#include <ATen/ops/empty.h>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::shard {

Pool::Buffer Pool::add(int64_t bytes) {
  slots_.push_back({at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_)), bytes, false});
  reserved_bytes_ += bytes;
  return static_cast<Buffer>(slots_.size()) - 1;
}

void Pool::reserve(int64_t bytes, int count) {
  for (int i = 0; i < count; ++i) add(bytes);
}

Pool::Buffer Pool::acquire(int64_t bytes) {
  Buffer best = -1;
  for (Buffer i = 0; i < static_cast<Buffer>(slots_.size()); ++i) {
    const Slot& slot = slots_[i];
    if (slot.taken || slot.size < bytes) continue;
    if (best < 0 || slot.size < slots_[best].size) best = i;
  }
  if (best < 0) {
    best = add(bytes);
    ++misses_;
    log(LogLevel::info, cat("pool: no free buffer of ", bytes, " bytes; allocated one (miss ", misses_, ")"));
  }
  slots_[best].taken = true;
  return best;
}

void Pool::release(Buffer buffer) {
  slots_[buffer].taken = false;
}

at::Tensor Pool::view(Buffer buffer, int64_t elements, c10::ScalarType dtype) const {
  const auto& bytes = slots_[buffer].bytes;
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, elements * size).view(dtype);
}

}  // namespace tesserae::shard
