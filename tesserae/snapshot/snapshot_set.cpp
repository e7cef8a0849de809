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
std::optional<SnapshotSet> collect(const mesh::Mesh& mesh, const mesh::Layout& layout, const HeldByRank& held,
                                   const Held& wanted) {
  SnapshotSet set{.session = wanted.session, .step = wanted.step, .buffer = {}};
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    set.buffer.push_back(buffer_with(held[static_cast<size_t>(rank)], wanted));
    if (set.buffer.back() >= 0) continue;
    const int other = neighbour(mesh, layout, rank);
    if (other < 0 || buffer_with(held[static_cast<size_t>(other)], wanted) < 0) return std::nullopt;
  }
  return set;
}

}  // namespace

int holder(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, int replica) {
  const int chunk = layout.chunk(mesh.index(mesh::axes::state, rank));
  return mesh.members(mesh::axes::state, rank)[static_cast<size_t>(layout.owner(chunk, replica))];
}

int neighbour(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, int direction) {
  const int replicas = layout.replicas();
  if (replicas == 1) return -1;
  const int own = layout.replica(mesh.index(mesh::axes::state, rank));
  return holder(mesh, layout, rank, (own + direction + replicas) % replicas);
}

std::optional<SnapshotSet> newest_complete_set(const mesh::Mesh& mesh, const mesh::Layout& layout,
                                               const HeldByRank& held, int64_t at_least) {
  std::optional<SnapshotSet> best;
  for (const auto& buffers : held) {
    for (const Held& candidate : buffers) {
      if (candidate.step < 0 || candidate.step < at_least || (best && candidate.step <= best->step)) continue;
      if (std::optional<SnapshotSet> set = collect(mesh, layout, held, candidate)) best = std::move(set);
    }
  }
  return best;
}

}  // namespace tesserae::snapshot
