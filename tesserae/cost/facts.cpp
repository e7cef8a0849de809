#include "tesserae/cost/facts.h"

namespace tesserae::cost {

Facts experts_of(const Facts& facts, int index) {
  Facts part = facts;
  const auto& [degree, parameters, unit, units] = facts.experts;
  part.experts = {};
  part.parameters = parameters;
  part.root_unit = 0;
  part.largest_unit = unit;
  part.trained_unit = 1;
  part.units = units;
  part.host_of.clear();
  for (int rank = index; rank < facts.ranks(); rank += degree) {
    part.host_of.push_back(facts.host_of[static_cast<size_t>(rank)]);
  }
  return part;
}

double owned_elements(const Facts& facts, const mesh::Degrees& degrees) {
  const double owned = static_cast<double>(facts.parameters) / degrees.optimizer;
  if (facts.experts.parameters == 0) return owned;
  const int ranks = facts.ranks() / facts.experts.degree;
  return owned + static_cast<double>(facts.experts.parameters) / mesh::limited(degrees, ranks).optimizer;
}

bool shares_gathered(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const int P = degrees.parameters;
  const int first = rank - rank % P;
  if (facts.tiers.parameters == offload::Tier::disk) return false;  // a copy would keep all of them in memory
  return facts.shared_copy && P > 1 && !spans_hosts(facts, first, first + P - 1);
}

}  // namespace tesserae::cost
