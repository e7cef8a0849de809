#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tests/sim/event.h"

namespace tesserae::sim {

/// The memory of one device: an anonymous file that is mapped twice. Tensors have addresses of the one mapping, which
/// nobody may read or write; tasks of streams use the other. A thread that touches the first ends the program with a
/// report that names the device, the allocation and the operation (report_faults).
///
/// Blocks are reused as CUDA's caching allocator reuses them: at once, by whoever asks next on the stream that they
/// were made on, the last one first; later, if other streams were recorded (record_stream), once these have done what
/// was enqueued when the block was freed. A freed block is filled with NaN (every byte 0xff), in the order of its
/// stream, and so is one that is used for the first time. Blocks are neither cut nor joined.
///
/// Any thread.
class Memory {
 public:
  /// Throws IoError.
  explicit Memory(c10::DeviceIndex device);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// Throws c10::OutOfMemoryError. `bytes` > 0.
  void* allocate(size_t bytes, c10::StreamId stream);
  /// What allocate() returned.
  void free(void* address) noexcept;
  /// `stream` uses the block around `address`, too.
  void record_stream(const void* address, c10::StreamId stream);
  /// Waits for nothing: free blocks of all streams may be used by all. For a device that is idle.
  void forget_streams();

  /// Takes no lock.
  bool holds(const void* address) const noexcept {
    const char* const byte = static_cast<const char*>(address);
    return byte >= tensors_ && byte < tensors_ + capacity;
  }
  /// The same byte, where tasks of streams may use it.
  char* for_tasks(const void* address) const noexcept {
    return tasks_ + (static_cast<const char*>(address) - tensors_);
  }

  /// Requests beyond that many bytes in all, each rounded up to 512, throw. restart() lifts it.
  void set_limit(size_t bytes);
  /// What requests that were not freed have asked for, rounded so.
  size_t asked_bytes() const;

  size_t used_bytes() const;
  size_t peak_bytes() const;
  void reset_peak();

  /// Writes to `text` what lies around `address`, in words. For a signal handler: it allocates nothing, and where it
  /// finds the memory locked it says so.
  void describe(const void* address, char* text, size_t size) const noexcept;

  static constexpr size_t capacity = size_t{4} << 30;

 private:
  struct Block {
    char* address = nullptr;
    size_t size = 0;   // of the block
    size_t asked = 0;  // by whom it has now
    c10::StreamId stream = 0;
    const char* made_by = "";
    const char* freed_by = "";
    bool taken = false;
    std::set<c10::StreamId> also_on;
    std::vector<MomentPtr> until;  // of the other streams, once it is freed
  };
  Block* take(size_t size, c10::StreamId stream);
  Block& carve(size_t size, c10::StreamId stream);
  void release(Block& block);
  void release_what_is_done();
  void fill_with_nan(const Block& block);
  Block& block_of(const void* address);

  const c10::DeviceIndex device_;
  char* tensors_ = nullptr;
  char* tasks_ = nullptr;
  mutable std::mutex mutex_;
  size_t carved_ = 0;
  size_t limit_ = capacity;
  size_t asked_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
  std::map<const char*, Block> blocks_;                                   // by address
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> free_;  // the last one freed is the last
  std::vector<Block*> waiting_;                                           // for other streams
};

/// A CPU tensor for tasks of streams that shows the elements of `tensor`, which lies on a device. It keeps nothing
/// alive: as with a kernel's arguments, who frees the tensor too early finds NaN in it. Undefined if `tensor` is.
at::Tensor for_tasks(const at::Tensor& tensor);

/// Lets a thread that touches device memory end with a report. Once a program.
void report_faults();

/// Makes torch use this memory, and pinned host memory that knows it is that.
void install_allocators();

/// Whether `address` lies in pinned host memory.
bool is_pinned(const void* address);
/// What pinned host memory takes: as torch's allocators do, this one rounds every request up to a power of two.
size_t pinned_bytes();

/// Makes room for `bytes` in the storage of device tensors; what it held stays.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace tesserae::sim
