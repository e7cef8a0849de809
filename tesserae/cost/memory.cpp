#include "tesserae/cost/memory.h"

#include <algorithm>

#include "tesserae/offload/disk.h"

namespace tesserae::cost {
RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const auto [P, G, O] = degrees;
  const auto elements = static_cast<double>(facts.parameters);
  const double trained = elements * facts.trained;
  const bool shared = shares_gathered(facts, degrees, rank);
  const bool same_dtype = facts.compute_bytes == facts.master_bytes;
  RankMemory memory;
  const auto in_memory = [](offload::Tier tier) { return tier != offload::Tier::disk; };
  const bool master_is_piece = P == O && same_dtype;
  if (P != O && !shared && in_memory(facts.tiers.parameters)) memory.pieces = facts.compute_bytes * elements / P;
  // Masters of the dtype that is gathered are parts of the shared copy.
  if (!(shared && master_is_piece) && in_memory(master_is_piece ? facts.tiers.parameters : facts.tiers.optimizer)) {
    memory.masters = facts.master_bytes * elements / O;
  }
  if (in_memory(facts.tiers.optimizer)) memory.state = facts.state_bytes * trained / O;
  if (in_memory(facts.tiers.gradients)) memory.gradients = facts.master_bytes * trained / O;
  if (facts.tiers.uses(offload::Tier::disk)) memory.window = offload::Disk::least_memory;
  if (facts.micro_batches > 1) memory.gradients += facts.reduce_bytes * trained / (facts.two_hop ? G : 1);

  const int inner = facts.units - 1;
  const auto root = static_cast<double>(facts.root_unit), largest = static_cast<double>(facts.largest_unit);
  const bool always_whole = P == 1 && (P != O || same_dtype) && in_memory(facts.tiers.parameters);
  if (!always_whole && !shared) {
    const double in_flight = facts.free_after_forward || !in_memory(facts.tiers.parameters)
                                 ? root + largest * std::min(facts.gathers_at_once, inner)
                                 : elements;
    memory.gathered = facts.compute_bytes * in_flight;
  }
  memory.reductions = facts.reduce_bytes * (root + largest * std::min(facts.reductions_at_once, inner));
  return memory;
}

double memory_of(const Facts& facts, const mesh::Degrees& degrees) {
  const auto copy = static_cast<double>(facts.parameters) * facts.compute_bytes;
  const int neighbours = facts.ranks_share_place ? facts.tensor : 1;
  double fullest = 0, place = 0;
  for (int rank = 0; rank < facts.ranks(); ++rank) {
    const bool new_place = rank == 0 || !facts.ranks_share_place || spans_hosts(facts, rank - 1, rank);
    if (new_place) place = 0;
    place += neighbours * memory_of_rank(facts, degrees, rank).total();
    if (shares_gathered(facts, degrees, rank) && rank % degrees.parameters == 0) place += neighbours * copy;
    fullest = std::max(fullest, place);
  }
  return fullest;
}

}  // namespace tesserae::cost
