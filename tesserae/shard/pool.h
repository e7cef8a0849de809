#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace tesserae::shard {

/// [Note: pool] Buffers for gathered parameters and for reductions.
///
/// Sized at set-up, so that peak memory is known before the first step, nothing fragments and addresses are stable. A
/// request takes the smallest free buffer that fits. One that finds none (the engine departs from the recorded order,
/// or everything is gathered at once for an export) allocates and is counted; the buffer then stays. It never blocks.
/// Used from one thread at a time. Order on a device comes from the lanes: a buffer is released when the work that uses
/// it has been queued on the compute stream, and the lane that fills it next first waits for that stream.
class Pool {
 public:
  explicit Pool(c10::Device device) : device_(device) {}

  /// Adds `count` buffers of `bytes`.
  void reserve(int64_t bytes, int count);

  /// A handle; -1 is no buffer.
  using Buffer = int;
  Buffer acquire(int64_t bytes);
  void release(Buffer buffer);

  /// [bytes] uint8; the same tensor for the life of the pool.
  const at::Tensor& bytes(Buffer buffer) const { return slots_[buffer].bytes; }
  /// The first `elements` elements of a buffer in some dtype.
  at::Tensor view(Buffer buffer, int64_t elements, c10::ScalarType dtype) const;

  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t misses() const { return misses_; }

 private:
  struct Slot {
    at::Tensor bytes;
    int64_t size = 0;
    bool taken = false;
  };
  Buffer add(int64_t bytes);

  c10::Device device_;
  std::vector<Slot> slots_;
  int64_t reserved_bytes_ = 0;
  int64_t misses_ = 0;
};

}  // namespace tesserae::shard
