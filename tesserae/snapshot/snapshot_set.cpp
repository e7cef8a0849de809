#include "tesserae/snapshot/snapshot_set.h"

#include <utility>

namespace tesserae::snapshot {
namespace {

int buffer_with(const std::array<Held, buffers_per_rank>& buffers, const Held& wanted) {
  for (size_t buffer = 0; buffer < buffers_per_rank; ++buffer) {
    if (buffers[buffer].session == wanted.session && buffers[buffer].step == wanted.step)
      return static_cast<int>(buffer);
  }
  return -1;
}

/// Nothing if a rank's part is nowhere.
std::optional<SnapshotSet> collect(const mesh::Layout& layout, int tensor, const HeldByRank& held, const Held& wanted) {
  SnapshotSet set{.session = wanted.session, .step = wanted.step, .buffer = {}};
  for (int rank = 0; rank < layout.ranks() * tensor; ++rank) {
    set.buffer.push_back(buffer_with(held[static_cast<size_t>(rank)], wanted));
    if (set.buffer.back() >= 0) continue;
    const int other = neighbour(layout, tensor, rank);
    if (other < 0 || buffer_with(held[static_cast<size_t>(other)], wanted) < 0) return std::nullopt;
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
  for (const auto& buffers : held) {
    for (const Held& candidate : buffers) {
      if (candidate.step < 0 || candidate.step < at_least || (best && candidate.step <= best->step)) continue;
      if (std::optional<SnapshotSet> set = collect(layout, tensor, held, candidate)) best = std::move(set);
    }
  }
  return best;
}

}  // namespace tesserae::snapshot
