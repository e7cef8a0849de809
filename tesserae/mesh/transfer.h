#pragma once

#include <cstdint>
#include <vector>

#include "tesserae/mesh/layout.h"

namespace tesserae::mesh {

/// A half-open range of logical elements of a flat buffer (padding excluded).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool operator==(const Range&) const = default;
};

/// Elements to copy from the source chunk of `peer` to this rank's destination chunk. `source` and `destination` are
/// logical element ranges of the same size; they are equal, and named twice because each side subtracts its own chunk's
/// begin.
struct Move {
  int peer = 0;
  Range source;
  Range destination;
  bool operator==(const Move&) const = default;
};

/// The logical elements that `rank` owns (its chunk) when `elements` are laid out: may be empty for the last chunks,
/// and is for a rank that the layout does not have. Throws InvalidArgument for a negative rank.
Range owned(const Layout& layout, int64_t elements, int64_t alignment, int rank);

/// What `rank` must obtain so that it owns its chunk of `to`, when every rank owns its chunk of `from`.
///
/// Pure arithmetic: no tensor, no communication. Layouts may have different numbers of ranks (checkpoints, elastic
/// size). `peer == rank` marks elements that are already local. Remote elements are taken from a rank that owns them,
/// spread over the replicas and, where that is no less even, from a rank nearby; every destination element comes
/// exactly once; the remote bytes equal the lower bound (what `rank` lacks). Ranges are in ascending order, at most one
/// for each peer. Takes time in proportion to the number of ranks, never to its square.
std::vector<Move> plan_transfer(const Layout& from, const Layout& to, int64_t elements, int64_t alignment, int rank);

/// The mirror of plan_transfer: what `rank`, as an owner under `from`, must send; `Move::peer` is the receiver, never
/// `rank` itself. In ascending order of (source.begin, peer).
std::vector<Move> plan_sends(const Layout& from, const Layout& to, int64_t elements, int64_t alignment, int rank);

}  // namespace tesserae::mesh
