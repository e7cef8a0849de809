#include "tesserae/cost/memory.h"

#include <algorithm>
#include <vector>

#include "tesserae/offload/disk.h"

namespace tesserae::cost {
namespace {

bool in_memory(offload::Tier tier) {
  return tier != offload::Tier::disk;
}

/// Gradients of micro-batches wait whole, in the wider of two dtypes (shard/flat_gradient.h).
bool adds_up_whole(const Facts& facts) {
  return facts.micro_batches > 1 && !facts.two_hop;
}

/// What is there between steps, of units that are sharded alike.
RankMemory kept_by_rank(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const auto [P, G, O] = degrees;
  const auto elements = static_cast<double>(facts.parameters);
  const double trained = elements * facts.trained;
  const bool shared = shares_gathered(facts, degrees, rank);
  const bool same_dtype = facts.compute_bytes == facts.master_bytes;
  RankMemory memory;
  const bool master_is_piece = P == O && same_dtype;
  if (P != O && !shared && in_memory(facts.tiers.parameters)) memory.pieces = facts.compute_bytes * elements / P;
  // Masters of the dtype that is gathered are parts of the shared copy.
  if (!(shared && master_is_piece) && in_memory(master_is_piece ? facts.tiers.parameters : facts.tiers.optimizer)) {
    memory.masters = facts.master_bytes * elements / O;
  }
  if (in_memory(facts.tiers.optimizer)) memory.state = facts.state_bytes * trained / O;
  if (in_memory(facts.tiers.gradients)) memory.gradients = facts.master_bytes * trained / O;
  if (facts.micro_batches > 1 && facts.two_hop) memory.gradients += facts.reduce_bytes * trained / G;
  if (adds_up_whole(facts)) memory.gradients += std::max(facts.reduce_bytes, facts.compute_bytes) * trained;
  return memory;
}

/// Elements of these units that are gathered into buffers, all of them if they stay; else of the largest but the root.
struct InBuffers {
  double root = 0, largest = 0;
  double all = 0;
};
InBuffers gathered_of(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  const auto [P, G, O] = degrees;
  const bool same_dtype = facts.compute_bytes == facts.master_bytes;
  const bool always_whole = P == 1 && (P != O || same_dtype) && in_memory(facts.tiers.parameters);
  if (always_whole || shares_gathered(facts, degrees, rank)) return {};
  return {static_cast<double>(facts.root_unit), static_cast<double>(facts.largest_unit),
          static_cast<double>(facts.parameters)};
}

/// Bytes of the copies that this rank is the first to share.
double copies_of(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  if (!shares_gathered(facts, degrees, rank) || rank % degrees.parameters != 0) return 0;
  return static_cast<double>(facts.parameters) * facts.compute_bytes;
}

}  // namespace

RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank) {
  RankMemory memory = kept_by_rank(facts, degrees, rank);
  InBuffers gathered = gathered_of(facts, degrees, rank);
  int inner = facts.units - 1, nested = 1;  // units inside others, and how many are in use at once
  // What is frozen is in buffers of its own, which nothing reduces.
  const double root = static_cast<double>(facts.root_unit) * facts.trained_root;
  double largest = static_cast<double>(facts.largest_unit) * facts.trained_unit;
  if (facts.experts.parameters > 0) {
    const int degree = facts.experts.degree;
    const Facts experts = experts_of(facts, rank % degree);
    const mesh::Degrees limited = mesh::limited(degrees, experts.ranks());
    const RankMemory kept = kept_by_rank(experts, limited, rank / degree);
    memory.pieces += kept.pieces;
    memory.masters += kept.masters;
    memory.state += kept.state;
    memory.gradients += kept.gradients;
    const InBuffers also = gathered_of(experts, limited, rank / degree);
    gathered = {gathered.root, std::max(gathered.largest, also.largest), gathered.all + also.all};
    largest = std::max(largest, static_cast<double>(experts.largest_unit) * experts.trained_unit);
    inner += experts.units;
    nested = 2;
  }
  if (facts.tiers.uses(offload::Tier::disk)) memory.window = offload::Disk::least_memory;

  // A block's are in use while its experts' come, and its gradients stay until the block's backward ends.
  const int gathers = std::min(std::max(facts.gathers_at_once, nested), inner);
  const int reductions = std::min(facts.reductions_at_once + nested - 1, inner);
  const bool freed = facts.free_after_forward || !in_memory(facts.tiers.parameters);
  memory.gathered = facts.compute_bytes * (freed ? gathered.root + gathered.largest * gathers : gathered.all);
  // What adds up whole is reduced where it is, unless that is in another dtype.
  const bool in_place = adds_up_whole(facts) && facts.reduce_bytes >= facts.compute_bytes;
  memory.reductions = in_place ? 0 : facts.reduce_bytes * (root + largest * reductions);
  return memory;
}

double memory_of(const Facts& facts, const mesh::Degrees& degrees) {
  if (!facts.ranks_share_place && !facts.shared_copy) return memory_of_rank(facts, degrees, 0).total();  // all alike
  const int neighbours = facts.ranks_share_place ? facts.tensor : 1, degree = facts.experts.degree;
  std::vector<Facts> experts;
  for (int index = 0; facts.experts.parameters > 0 && index < degree; ++index) {
    experts.push_back(experts_of(facts, index));
  }
  double fullest = 0, place = 0;
  for (int rank = 0; rank < facts.ranks(); ++rank) {
    const bool new_place = rank == 0 || !facts.ranks_share_place || spans_hosts(facts, rank - 1, rank);
    if (new_place) place = 0;
    double of_rank = memory_of_rank(facts, degrees, rank).total() + copies_of(facts, degrees, rank);
    if (!experts.empty()) {
      const Facts& part = experts[static_cast<size_t>(rank % degree)];
      of_rank += copies_of(part, mesh::limited(degrees, part.ranks()), rank / degree);
    }
    place += neighbours * of_rank;
    fullest = std::max(fullest, place);
  }
  return fullest;
}

}  // namespace tesserae::cost
