#pragma once

#include "tesserae/cost/facts.h"
#include "tesserae/shard/engine.h"

namespace tesserae::dial {

/// What an engine tells of its job, its model and its options. `state_per_master`: the optimizer's state in bytes for
/// each byte of a master (AdamW: 2). `micro_batches`: forwards and backwards of a step. shared_copy is left for the
/// Dial, which asks all ranks.
cost::Facts facts_of(shard::Engine& engine, double state_per_master = 2, int micro_batches = 1);
/// The same with experts that are shared out over so many ranks.
cost::Facts shared_out(cost::Facts facts, int degree);

}  // namespace tesserae::dial
