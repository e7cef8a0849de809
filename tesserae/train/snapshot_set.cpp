#include "tesserae/train/snapshot_set.h"

#include <utility>

namespace tesserae::train {
namespace {

int slot_with(const std::array<Held, memory_slots>& slots, const Held& wanted) {
  for (size_t slot = 0; slot < memory_slots; ++slot) {
    if (slots[slot].session == wanted.session && slots[slot].step == wanted.step) return static_cast<int>(slot);
  }
  return -1;
}

/// Nothing if a rank's part is nowhere.
std::optional<SnapshotSet> collect(const mesh::Layout& layout, int tensor, const HeldByRank& held, const Held& wanted) {
  SnapshotSet set{.session = wanted.session, .step = wanted.step, .slot = {}};
  for (int rank = 0; rank < layout.ranks() * tensor; ++rank) {
    set.slot.push_back(slot_with(held[static_cast<size_t>(rank)], wanted));
    if (set.slot.back() >= 0) continue;
    const int other = neighbour(layout, tensor, rank);
    if (other < 0 || slot_with(held[static_cast<size_t>(other)], wanted) < 0) return std::nullopt;
  }
  return set;
}

}  // namespace

int neighbour(const mesh::Layout& layout, int tensor, int rank, int direction) {
  const int replicas = layout.replicas(), data = rank / tensor;
  if (replicas == 1) return -1;
  const int next = layout.owner(layout.chunk(data), (layout.replica(data) + direction + replicas) % replicas);
  return next * tensor + rank % tensor;
}

std::optional<SnapshotSet> newest_complete_set(const mesh::Layout& layout, int tensor, const HeldByRank& held,
                                               int64_t at_least) {
  std::optional<SnapshotSet> best;
  for (const auto& slots : held) {
    for (const Held& candidate : slots) {
      if (candidate.step < 0 || candidate.step < at_least || (best && candidate.step <= best->step)) continue;
      if (std::optional<SnapshotSet> set = collect(layout, tensor, held, candidate)) best = std::move(set);
    }
  }
  return best;
}

}  // namespace tesserae::train
