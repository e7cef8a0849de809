#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

#include "tesserae/base/error.h"
#include "tests/sim/counters.h"
#include "tests/sim/memory.h"
#include "tests/sim/stream.h"

namespace tesserae::sim {

/// [Note: simulated accelerator] `sim` is a device of torch whose kernels are the CPU's, and whose rules are CUDA's:
///
///  1. Streams are threads (stream.h). The host enqueues and goes on; what orders two streams is events (event.h) and
///     nothing else. Delays before each task come from a seed.
///  2. Memory is mapped twice (memory.h). Tensors point to where nobody may read or write; streams use the other
///     mapping. The host that reads device memory ends with a report of who did it.
///  3. What is freed is filled with NaN, and given to the next who asks on the same stream.
///  4. Operators are enqueued (operators.cpp): meta kernels say what their outputs are, CPU kernels compute them.
///  5. A process group (process_group.h) has NCCL's rules: one order on all ranks, nothing waits on the host.
///
/// So a missing wait, a use after free, a hidden synchronisation, a device index mixed up or an access from the host
/// shows in a test without a GPU. What does not: numerics of other kernels, speed, graphs.

/// As many devices as a job of threads has ranks: autograd has threads for each device, so each rank has its own.
inline constexpr c10::DeviceIndex device_count = 8;

struct Options {
  uint64_t seed = 0;                             ///< of the delays
  std::chrono::microseconds longest_delay{400};  ///< before a task
};

/// Makes `sim` known to torch. Once a program, before the first tensor; again does nothing.
void install();

/// Waits for all devices, forgets their failures, and lets the delays begin anew. Not while ranks run.
void restart(const Options& options = {});

/// Device `index`, as torch names it.
c10::Device device(c10::DeviceIndex index);

/// An operator threw on the device, after the host had gone on. Thrown by whatever waits for that device, until
/// restart().
class DeviceFailure : public Error {
 public:
  using Error::Error;
};

/// One device: its streams, its memory and what it did. All of them live until the program ends.
class Device {
 public:
  /// Made at its first use. Throws InvalidArgument if there is no such device.
  static Device& at(c10::DeviceIndex index);
  /// Null: it was not used yet, or there is none. Takes no lock.
  static Device* find(c10::DeviceIndex index) noexcept;

  /// Stream 0 is the default one; those after it are the pool's, the first half of low priority. Throws
  /// InvalidArgument.
  Stream& stream(c10::StreamId id);
  /// One of the pool, in turn: like CUDA's there are 32 of each priority, and the 33rd is the first again.
  c10::StreamId next_stream(bool high_priority);
  Stream& current_stream();

  Memory& memory() { return memory_; }
  const Memory& memory() const { return memory_; }
  Tally& tally() { return tally_; }

  /// Waits on the host for all streams or one moment, counts that, and throws what failed on this device.
  void synchronize();
  void synchronize(const Stream& stream);
  void synchronize(const Moment& moment);
  bool idle();

  void fail(const char* what, std::exception_ptr cause);
  /// Throws the first failure since restart().
  void check();

 private:
  friend void restart(const Options& options);
  friend struct Everything;
  explicit Device(c10::DeviceIndex index);
  void restart_streams(const Options& options);
  void stop();
  template <class Do>
  void for_each_stream(const Do& what);

  static constexpr c10::StreamId pool_size = 32;

  const c10::DeviceIndex index_;
  Memory memory_;
  Tally tally_;
  std::mutex mutex_;
  Options options_;
  std::array<std::unique_ptr<Stream>, 1 + 2 * pool_size> streams_;
  std::array<c10::StreamId, 2> next_{};
  std::exception_ptr failure_;
};

/// The device and the streams that this thread uses.
c10::DeviceIndex current_device() noexcept;
c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept;
c10::StreamId current_stream(c10::DeviceIndex index) noexcept;
c10::StreamId exchange_stream(c10::DeviceIndex index, c10::StreamId id) noexcept;

}  // namespace tesserae::sim
