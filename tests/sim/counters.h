#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace tesserae::sim {

/// What a device did. A step's figures are the difference of two readings:
///
///   const Counters before = counters(0);
///   step();
///   EXPECT_EQ((counters(0) - before).synchronizations, 0);
struct Counters {
  int64_t launches = 0;  ///< kernels and copies that were enqueued; not marks, waits and what the allocator does
  int64_t synchronizations = 0;  ///< times that the host waited for the device, whoever asked for it
  int64_t unknown_shapes = 0;    ///< operators that ran at once, after such a wait, since nobody knew their outputs
  int64_t collectives = 0;
  int64_t allocations = 0;
  int64_t allocated_bytes = 0;  ///< as they were asked for
  int64_t copied_bytes = 0;     ///< between host and device, both ways

  friend Counters operator-(const Counters& later, const Counters& earlier) {
    return {later.launches - earlier.launches,
            later.synchronizations - earlier.synchronizations,
            later.unknown_shapes - earlier.unknown_shapes,
            later.collectives - earlier.collectives,
            later.allocations - earlier.allocations,
            later.allocated_bytes - earlier.allocated_bytes,
            later.copied_bytes - earlier.copied_bytes};
  }
};

/// Of one device, since the program began. Any thread.
Counters counters(c10::DeviceIndex device);

/// Where a device counts: any thread adds at any time.
struct Tally {
  std::atomic<int64_t> launches = 0;
  std::atomic<int64_t> synchronizations = 0;
  std::atomic<int64_t> unknown_shapes = 0;
  std::atomic<int64_t> collectives = 0;
  std::atomic<int64_t> allocations = 0;
  std::atomic<int64_t> allocated_bytes = 0;
  std::atomic<int64_t> copied_bytes = 0;

  Counters read() const {
    return {launches, synchronizations, unknown_shapes, collectives, allocations, allocated_bytes, copied_bytes};
  }
};

}  // namespace tesserae::sim
