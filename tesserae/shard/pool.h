#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace tesserae::shard {

/// [Note: pool] Buffers for gathered parameters and for reductions.
///
/// Sized at set-up, so that peak memory is known before the first step and nothing fragments. A request takes the
/// smallest free buffer that fits, its own before those of nobody. One that finds none (the engine departs from the
/// recorded order, or everything is gathered at once for an export) allocates and is counted; the buffer then stays. It
/// never blocks.
///
/// Addresses are stable, unless the pool is elastic: then a free buffer can be without memory, and has some again, at
/// another address, when it is next acquired. Tensors made by view() stay valid through that: they show the memory that
/// the buffer has.
///
/// Used from one thread at a time. Order on a device comes from the lanes: a buffer is released when the work that uses
/// it has been queued on the compute stream, and the lane that fills it next first waits for that stream.
class Pool {
 public:
  explicit Pool(c10::Device device, bool elastic = false) : device_(device), elastic_(elastic) {}

  /// Adds `count` buffers of `bytes`. `owner`: nobody else is given them. Without, a smaller unit could take the one
  /// that was meant for a larger, which would then find none that fits.
  void reserve(int64_t bytes, int count, const void* owner = nullptr);

  /// A handle; -1 is no buffer.
  using Buffer = int;
  Buffer acquire(int64_t bytes, const void* owner = nullptr);
  /// `keep`: the next acquire() is soon. Of use to an elastic pool only.
  void release(Buffer buffer, bool keep = true);
  /// An elastic pool gives the memory of all free buffers back.
  void give_back();

  /// [bytes] uint8; the same tensor for the life of the pool.
  const at::Tensor& bytes(Buffer buffer) const { return slots_[buffer].bytes; }
  /// The first `elements` elements of a buffer in some dtype.
  at::Tensor view(Buffer buffer, int64_t elements, c10::ScalarType dtype) const;

  bool elastic() const { return elastic_; }
  /// Of all buffers, whether or not they have memory now.
  int64_t reserved_bytes() const { return reserved_bytes_; }
  int64_t held_bytes() const;
  int64_t misses() const { return misses_; }

 private:
  struct Slot {
    at::Tensor bytes;
    int64_t size = 0;
    const void* owner = nullptr;
    bool taken = false;
    bool held = false;
  };
  Buffer add(int64_t bytes, const void* owner);
  void hold(Slot& slot);
  void drop(Slot& slot);

  c10::Device device_;
  bool elastic_;
  std::vector<Slot> slots_;
  int64_t reserved_bytes_ = 0;
  int64_t misses_ = 0;
};

}  // namespace tesserae::shard
