#include "tesserae/cost/facts.h"

namespace tesserae::cost {

bool spans_hosts(const Facts& facts, int first, int last) {
  return facts.host_of[static_cast<size_t>(first)] != facts.host_of[static_cast<size_t>(last)];
}

bool shares_gathered(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const int P = degrees.parameters;
  const int first = rank - rank % P;
  if (facts.tiers.parameters == offload::Tier::disk) return false;  // a copy would keep all of them in memory
  return facts.shared_copy && P > 1 && !spans_hosts(facts, first, first + P - 1);
}

}  // namespace tesserae::cost
