#include "tesserae/cost/memory.h"

#include <algorithm>

namespace tesserae::cost {

RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const auto [P, G, O] = degrees;
  const auto elements = static_cast<double>(facts.parameters);
  const bool shared = shares_gathered(facts, degrees, rank);
  const bool same_dtype = facts.compute_bytes == facts.master_bytes;
  RankMemory memory;
  if (P != O && !shared) memory.pieces = facts.compute_bytes * elements / P;
  // Masters of the dtype that is gathered are parts of the shared copy.
  if (!(shared && P == O && same_dtype)) memory.masters = facts.master_bytes * elements / O;
  memory.state = facts.state_bytes * elements / O;
  memory.gradients = facts.master_bytes * elements / O;
  if (facts.micro_batches > 1) memory.gradients += facts.reduce_bytes * elements / (facts.two_hop ? G : 1);

  const int inner = facts.units - 1;
  const auto root = static_cast<double>(facts.root_unit), largest = static_cast<double>(facts.largest_unit);
  const bool always_whole = P == 1 && (P != O || same_dtype);
  if (!always_whole && !shared) {
    const double in_flight =
        facts.free_after_forward ? root + largest * std::min(facts.gathers_at_once, inner) : elements;
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
