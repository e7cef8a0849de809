#include "tesserae/dial/facts.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tesserae/cost/fabric_facts.h"

namespace tesserae::dial {

cost::Facts facts_of(shard::Engine& engine, double state_per_master, int micro_batches) {
  const shard::Options& options = engine.root().sharding().options;
  cost::Facts facts = cost::facts_of(*engine.root().sharding().fabric);
  facts.units = static_cast<int>(engine.units().size());
  for (const auto& unit : engine.units()) {
    int64_t elements = 0;
    for (const auto& buffer : unit->buffers()) {
      elements += buffer->flat().parameter_elements();
      facts.compute_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().compute));
      facts.reduce_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().reduce));
      facts.master_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().master));
    }
    facts.parameters += elements;
    const bool root = unit.get() == &engine.root();
    (root ? facts.root_unit : facts.largest_unit) = root ? elements : std::max(facts.largest_unit, elements);
  }
  facts.state_bytes = state_per_master * facts.master_bytes;
  facts.gathers_at_once = options.limit_all_gathers;
  facts.reductions_at_once = options.limit_reductions;
  // A lifetime that never frees because P is 1 frees once P is more: see shard::Reshard.
  const bool never_gathered = options.strategy.degrees.parameters == 1;
  facts.free_after_forward = options.strategy.free_after_forward || never_gathered;
  facts.free_after_backward = options.strategy.free_after_backward || never_gathered;
  facts.micro_batches = micro_batches;
  facts.two_hop = options.accumulation == shard::Accumulation::two_hop;
  return facts;
}

}  // namespace tesserae::dial
