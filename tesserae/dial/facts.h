#pragma once

#include "tesserae/cost/facts.h"
#include "tesserae/shard/engine.h"

namespace tesserae::dial {

/// What an engine tells of its job, its model and its options. `state_per_master`: the optimizer's state in bytes for
/// each byte of a master (AdamW: 2). `micro_batches`: forwards and backwards of a step. shared_copy is left for the
/// Dial, which asks all ranks.
cost::Facts facts_of(shard::Engine& engine, double state_per_master = 2, int micro_batches = 1);

}  // namespace tesserae::dial
