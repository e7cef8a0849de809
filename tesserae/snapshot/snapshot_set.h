#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"

namespace tesserae::snapshot {

/// A snapshot that a rank holds in memory.
struct Held {
  int64_t session = 0;  ///< the job that made it
  int64_t step = -1;    ///< -1: there is none
};

inline constexpr size_t buffers_per_rank = 2;
using HeldByRank = std::vector<std::array<Held, buffers_per_rank>>;  ///< [rank][buffer]

/// Snapshots of one save from which all ranks can go on.
struct SnapshotSet {
  int64_t session = 0;
  int64_t step = 0;
  std::vector<int> buffer;  ///< of each rank; -1: it has none, and asks its neighbour
};

/// The job ranks that hold what `rank` does of what all ranks share out, or with `experts`, of what those of an expert
/// index do: the same chunk of the same parts. By replica, ascending. `layout`: of the ranks that shard state.
std::vector<int> holders(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, bool experts);

/// The first of them that is among those `left` (by rank), which writes for all; -1: none is.
int first_holder(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, bool experts,
                 const std::vector<bool>& left);
/// Whether those that are left hold all that all ranks did.
bool hold_everything(const mesh::Mesh& mesh, const mesh::Layout& layout, const std::vector<bool>& left);

/// The next rank that holds all that `rank` does (with direction -1, the previous); -1: there is no other.
int neighbour(const mesh::Mesh& mesh, const mesh::Layout& layout, int rank, int direction = 1);

/// The latest set of step `at_least` or later that is complete: each rank holds its part, or its neighbour does. The
/// same on all ranks, as it depends on nothing else.
std::optional<SnapshotSet> newest_complete_set(const mesh::Mesh& mesh, const mesh::Layout& layout,
                                               const HeldByRank& held, int64_t at_least);

}  // namespace tesserae::snapshot
