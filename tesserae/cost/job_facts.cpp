#include "tesserae/cost/job_facts.h"

#include <algorithm>

#include "tesserae/cost/transformer.h"

namespace tesserae::cost {

void set_model(Facts& facts, const model::GptConfig& model, int tensor, int expert) {
  const PartSizes part = part_sizes(model, tensor, expert);
  const int64_t experts = part.experts * model.layers;
  facts.experts = {.degree = expert, .parameters = experts, .unit = part.experts};
  if (experts > 0) facts.experts.units = static_cast<int>(model.layers);
  facts.parameters = part.total - experts;
  facts.root_unit = part.root;
  facts.largest_unit = std::max(part.block, part.head);
  facts.units = static_cast<int>(model.layers) + (part.head > 0 ? 2 : 1);
}

void set_options(Facts& facts, const shard::Options& options) {
  const mesh::Degrees all{facts.ranks(), facts.ranks(), facts.ranks()};
  const mesh::Strategy strategy = mesh::with_degrees(options.strategy, all);
  facts.free_after_forward = strategy.free_after_forward;
  facts.free_after_backward = strategy.free_after_backward;
  facts.gathers_at_once = options.limit_all_gathers;
  facts.reductions_at_once = options.limit_reductions;
  facts.two_hop = options.accumulation == shard::Accumulation::two_hop;
}

}  // namespace tesserae::cost
