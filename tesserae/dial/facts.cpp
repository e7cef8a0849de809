#include "tesserae/dial/facts.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tesserae/cost/fabric_facts.h"

namespace tesserae::dial {

cost::Facts facts_of(shard::Engine& engine, double state_per_master, int micro_batches) {
  const shard::Options& options = engine.context().options;
  cost::Facts facts = cost::facts_of(*engine.context().fabric);
  facts.units = engine.unit_count();
  for (int unit = 0; unit < engine.unit_count(); ++unit) {
    int64_t elements = 0;
    for (int index = 0; index < engine.flats_of(unit); ++index) {
      const shard::Engine::FlatView view = engine.flat_of(unit, index);
      elements += view.flat.parameter_elements();
      facts.compute_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().compute));
      facts.reduce_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().reduce));
      facts.master_bytes = static_cast<int>(c10::elementSize(view.flat.dtypes().master));
    }
    facts.parameters += elements;
    (unit == 0 ? facts.root_unit : facts.largest_unit) = unit == 0 ? elements : std::max(facts.largest_unit, elements);
  }
  facts.state_bytes = state_per_master * facts.master_bytes;
  facts.gathers_at_once = options.limit_all_gathers;
  facts.reductions_at_once = options.limit_reductions;
  // A lifetime that never frees because P is 1 frees once P is more: see Engine::reshard.
  const bool never_gathered = options.strategy.degrees.parameters == 1;
  facts.free_after_forward = options.strategy.free_after_forward || never_gathered;
  facts.free_after_backward = options.strategy.free_after_backward || never_gathered;
  facts.micro_batches = micro_batches;
  facts.two_hop = options.accumulation == shard::Accumulation::two_hop;
  return facts;
}

}  // namespace tesserae::dial
