#pragma once

#include <cstdint>

namespace tesserae::shard {

/// What an engine has done so far. Times in seconds, sizes in bytes, all of this rank.
struct Statistics {
  int64_t steps = 0;                ///< boundaries passed
  double exposed_gather = 0;        ///< what computes stood still for parameters; on a device, as far as that is over
  double exposed_reduce = 0;        ///< the same for gradients
  int64_t gathers = 0;              ///< flat buffers gathered
  int64_t prefetch_hits = 0;        ///< of those, started before they were asked for
  int64_t reductions = 0;           ///< flat buffers reduced
  int64_t gradients_in_place = 0;   ///< gradients that were computed where they are reduced: none was copied
  int64_t departures = 0;           ///< units that were asked for out of the recorded order
  int64_t pool_reserved_bytes = 0;  ///< memory of the buffer pool
  int64_t pool_misses = 0;          ///< requests that found no buffer: each allocated
  int64_t allocations = 0;          ///< tensors that the engine allocated, set-up included
  int64_t state_bytes = 0;          ///< parameters, gradients and masters that this rank holds between steps
};

}  // namespace tesserae::shard
