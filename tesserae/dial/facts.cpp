#include "tesserae/dial/facts.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/job_facts.h"

namespace tesserae::dial {
namespace {

/// Whether a unit lies inside another one that is not the root, as experts do in their block.
bool is_inside(const shard::ShardedUnit& unit, const shard::Engine& engine) {
  return std::ranges::any_of(engine.units(), [&](const auto& other) {
    return other.get() != &engine.root() && unit.name().starts_with(other->name() + ".");
  });
}

}  // namespace

cost::Facts facts_of(shard::Engine& engine, double state_per_master, int micro_batches) {
  const shard::Sharding& sharding = engine.root().sharding();
  cost::Facts facts = cost::facts_of(*sharding.fabric);
  facts.tensor = cost::tensor_ranks_of_host(*sharding.mesh);
  facts.units = 0;
  int64_t all = 0, trained = 0, trained_root = 0, trained_unit = 0;
  for (const auto& unit : engine.units()) {
    int64_t elements = 0, reduced = 0;
    for (const auto& buffer : unit->buffers()) {
      elements += buffer->flat().parameter_elements();
      if (buffer->flat().trainable()) reduced += buffer->flat().parameter_elements();
      facts.compute_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().compute));
      facts.reduce_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().reduce));
      facts.master_bytes = static_cast<int>(c10::elementSize(buffer->flat().dtypes().master));
    }
    all += elements;
    trained += reduced;
    const int degree = sharding.fabric->size() / unit->sharding().fabric->size();
    if (degree > 1 || (unit.get() != &engine.root() && is_inside(*unit, engine))) {
      facts.experts = {.degree = std::max(facts.experts.degree, degree),
                       .parameters = facts.experts.parameters + elements,
                       .unit = std::max(facts.experts.unit, elements),
                       .units = facts.experts.units + 1};
      continue;
    }
    ++facts.units;
    facts.parameters += elements;
    const bool root = unit.get() == &engine.root();
    (root ? facts.root_unit : facts.largest_unit) = root ? elements : std::max(facts.largest_unit, elements);
    (root ? trained_root : trained_unit) = root ? reduced : std::max(trained_unit, reduced);
  }
  facts.trained_root = cost::share_of(trained_root, facts.root_unit);
  facts.trained_unit = cost::share_of(trained_unit, facts.largest_unit);
  facts.trained = cost::share_of(trained, all);
  facts.state_bytes = state_per_master * facts.master_bytes;
  cost::set_options(facts, sharding.options);
  facts.micro_batches = micro_batches;
  return facts;
}

cost::Facts shared_out(cost::Facts facts, int degree) {
  const double parts = static_cast<double>(facts.experts.degree) / degree;
  facts.experts = {.degree = degree,
                   .parameters = std::llround(static_cast<double>(facts.experts.parameters) * parts),
                   .unit = std::llround(static_cast<double>(facts.experts.unit) * parts),
                   .units = facts.experts.units};
  return facts;
}

}  // namespace tesserae::dial
