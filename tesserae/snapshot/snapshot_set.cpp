#include "tesserae/snapshot/snapshot_set.h"

#include <algorithm>
#include <iterator>
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

std::vector<int> holders(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, bool experts) {
  const mesh::AxisSet axes = experts ? mesh::axes::expert_state : mesh::axes::state;
  const int ranks = mesh.degree(axes);
  const mesh::Layout sharded(ranks, mesh::limited(layout.degrees(), ranks));
  const std::vector<int> members = mesh.members(axes, rank);
  const int chunk = sharded.chunk(mesh.index(axes, rank));
  std::vector<int> found;
  for (int replica = 0; replica < sharded.replicas(); ++replica) {
    found.push_back(members[static_cast<size_t>(sharded.owner(chunk, replica))]);
  }
  return found;
}

int first_holder(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, bool experts,
                 const std::vector<bool>& left) {
  const std::vector<int> all = holders(mesh, layout, rank, experts);
  const auto first = std::ranges::find_if(all, [&](int other) { return left[static_cast<size_t>(other)]; });
  return first != all.end() ? *first : -1;
}

bool hold_everything(const mesh::Mesh& mesh, const mesh::Layout& layout, const std::vector<bool>& left) {
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    for (const bool experts : {false, true}) {
      if (first_holder(mesh, layout, rank, experts, left) < 0) return false;
    }
  }
  return true;
}

int neighbour(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, int direction) {
  const std::vector<int> all = holders(mesh, layout, rank, false), experts = holders(mesh, layout, rank, true);
  std::vector<int> both;
  std::ranges::set_intersection(all, experts, std::back_inserter(both));
  if (both.size() == 1) return -1;
  const auto own = std::ranges::find(both, rank) - both.begin(), size = std::ssize(both);
  return both[static_cast<size_t>((own + direction + size) % size)];
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
