#pragma once

#include <cstdint>

#include "tesserae/comm/fabric.h"
#include "tesserae/dial/estimate.h"
#include "tesserae/shard/engine.h"

namespace tesserae::dial {

/// What a fabric tells of a job: hosts, whose memory is shared, and how.
Facts facts_of(const comm::Fabric& fabric);

/// The same with what an engine tells of its model and options. `state_per_master`: the optimizer's state in bytes for
/// each byte of a master (AdamW: 2). `micro_batches`: forwards and backwards of a step. shared_copy is left for the
/// Dial, which asks all ranks.
Facts facts_of(shard::Engine& engine, double state_per_master = 2, int micro_batches = 1);

/// Memory as one rank sees it at a step edge, in bytes.
struct PlaceMemory {
  double used = 0;       ///< the most that this rank held since the last call
  double transient = 0;  ///< of it, what is free again now
  double free = 0;       ///< of the place now: the host, or this rank's device
  double total = 0;      ///< of the place; 0: unknown
};
PlaceMemory place_memory(c10::Device device);

/// free and total of the place, over all ranks of the job, that has the smallest share free. Collective.
PlaceMemory fullest_place(comm::Fabric& fabric);

}  // namespace tesserae::dial
