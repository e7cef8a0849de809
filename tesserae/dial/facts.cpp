#include "tesserae/dial/facts.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/job_facts.h"

namespace tesserae::dial {

cost::Facts facts_of(shard::Engine& engine, double state_per_master, int micro_batches) {
  const shard::Sharding& sharding = engine.root().sharding();
  cost::Facts facts = cost::facts_of(*sharding.fabric);
  facts.tensor = cost::tensor_ranks_of_host(*sharding.mesh);
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
  cost::set_options(facts, sharding.options);
  facts.micro_batches = micro_batches;
  return facts;
}

}  // namespace tesserae::dial
