#include "tesserae/mesh/transfer.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"

// A plan intersects two sorted partitions of the elements: the chunks of `from` and the chunks of `to`. What remains to
// be decided is which of the R replicas of a source chunk serves which receiver, so that sender and receiver agree
// without a word. [Note: demand line]
//   1. For one source chunk, lay every copy of a part of it that some rank lacks on a line: destination replica after
//      destination replica, within one in order of the destination chunks. Copies that are already local are left out.
//   2. Cut the line in R equal stretches, one per source replica. A copy belongs to the stretch with its middle.
// So every replica sends its equal share to within one copy. And because replicas are blocks of consecutive ranks on
// both sides, a receiver's place on the line grows with its rank, as the source's does: where one O divides the other,
// copies stay inside the larger block. The place is computed in closed form: no rank enumerates the receivers of
// others.
namespace tesserae::mesh {
namespace {

using Wide = __int128;  // elements times ranks times ranks does not fit in 64 bits

Range chunk_range(int64_t elements, int64_t chunk_elements, int chunk) {
  const int64_t begin = std::min(elements, checked_mul(chunk, chunk_elements));
  return {begin, std::min(elements, checked_add(begin, chunk_elements))};
}

Range intersect(const Range& a, const Range& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

/// The inverse of `value` modulo `modulus` (coprime), in [0, modulus).
int64_t inverse(int64_t value, int64_t modulus) {
  int64_t r0 = modulus, r1 = value % modulus, x0 = 0, x1 = 1;
  while (r1 != 0) {
    const int64_t quotient = r0 / r1;
    std::tie(r0, r1) = std::tuple(r1, r0 - quotient * r1);
    std::tie(x0, x1) = std::tuple(x1, x0 - quotient * x1);
  }
  return (x0 % modulus + modulus) % modulus;
}

/// The replicas of one destination chunk, as receivers of its part of one source chunk.
struct Receivers {
  int chunk;    ///< the destination chunk
  Range range;  ///< its part of the source chunk
  // The replicas that own the source chunk themselves: first_local, first_local + period, ..., below local_end.
  int64_t first_local, period, local_end;

  /// How many of the replicas below `replica` lack the range.
  int64_t lacking_before(int64_t replica) const {
    const int64_t end = std::min(replica, local_end);
    return replica - (end <= first_local ? 0 : (end - first_local - 1) / period + 1);
  }
  bool lacks(int64_t replica) const { return lacking_before(replica + 1) != lacking_before(replica); }
};

class Planner {
 public:
  Planner(const Layout& from, const Layout& to, int64_t elements, int64_t alignment)
      : from_(from),
        to_(to),
        elements_(elements),
        from_chunk_(from.chunk_elements(elements, alignment)),
        to_chunk_(to.chunk_elements(elements, alignment)) {
    const int64_t O = from.degrees().optimizer;
    common_ = std::gcd(O, int64_t{to.degrees().optimizer});
    period_ = O / common_;
    inverse_ = period_ == 1 ? 0 : inverse(to.degrees().optimizer / common_, period_);
  }

  Range source(int chunk) const { return chunk_range(elements_, from_chunk_, chunk); }
  Range destination(int chunk) const { return chunk_range(elements_, to_chunk_, chunk); }

  /// The first and last source chunk that a non-empty range touches.
  std::pair<int, int> source_chunks(const Range& range) const { return touched(range, from_chunk_); }

  /// Everyone who wants a part of a source chunk, in order of the destination chunks.
  std::vector<Receivers> receivers(int source_chunk) const {
    const Range whole = source(source_chunk);
    if (whole.empty()) return {};
    const auto [first, last] = touched(whole, to_chunk_);
    std::vector<Receivers> all;
    all.reserve(last - first + 1);
    for (int chunk = first; chunk <= last; ++chunk) {
      all.push_back(receivers(source_chunk, chunk, intersect(whole, destination(chunk))));
    }
    return all;
  }

 private:
  static std::pair<int, int> touched(const Range& range, int64_t chunk_elements) {
    return {static_cast<int>(range.begin / chunk_elements), static_cast<int>((range.end - 1) / chunk_elements)};
  }

  /// Replica j of destination chunk d is rank j O' + d0, and owns source chunk c too if that is c0 modulo O: a linear
  /// congruence in j, whose solutions are spaced by O / gcd(O, O').
  Receivers receivers(int source_chunk, int chunk, const Range& range) const {
    const int64_t gap = int64_t{from_.owner(source_chunk, 0)} - to_.owner(chunk, 0);
    const int64_t shared_ranks = std::min(from_.ranks(), to_.ranks()) - to_.owner(chunk, 0);
    const int64_t width = to_.degrees().optimizer;
    if (gap % common_ != 0 || shared_ranks <= 0) return {chunk, range, 0, 1, 0};
    const int64_t first = (gap / common_ % period_ + period_) * inverse_ % period_;
    return {chunk, range, first, period_, (shared_ranks + width - 1) / width};
  }

  const Layout& from_;
  const Layout& to_;
  int64_t elements_, from_chunk_, to_chunk_;
  int64_t common_, period_, inverse_;
};

/// See [Note: demand line]: which source replica serves the copy whose first element is at `begin` on the line.
int serving_replica(Wide begin, int64_t size, Wide line, int replicas) {
  return static_cast<int>((2 * begin + size) * replicas / (2 * line));
}

Wide line_length(const std::vector<Receivers>& receivers, int destination_replicas) {
  Wide line = 0;
  for (const Receivers& r : receivers) line += Wide{r.range.size()} * r.lacking_before(destination_replicas);
  return line;
}

void check_rank(std::string_view function, int rank) {
  if (rank < 0) throw InvalidArgument(function, cat("rank ", rank, " is negative"));
}

}  // namespace

Range owned(const Layout& layout, int64_t elements, int64_t alignment, int rank) {
  check_rank("owned", rank);
  const int64_t chunk_elements = layout.chunk_elements(elements, alignment);
  if (rank >= layout.ranks()) return {elements, elements};
  return chunk_range(elements, chunk_elements, layout.chunk(rank));
}

std::vector<Move> plan_transfer(const Layout& from, const Layout& to, int64_t elements, int64_t alignment, int rank) {
  check_rank("plan_transfer", rank);
  const Planner planner(from, to, elements, alignment);
  if (rank >= to.ranks()) return {};
  const int chunk = to.chunk(rank);
  const int replica = to.replica(rank);
  const Range wanted = planner.destination(chunk);
  if (wanted.empty()) return {};

  const auto [first, last] = planner.source_chunks(wanted);
  std::vector<Move> moves;
  moves.reserve(last - first + 1);
  for (int source = first; source <= last; ++source) {
    const Range part = intersect(wanted, planner.source(source));
    if (rank < from.ranks() && from.chunk(rank) == source) {
      moves.push_back({rank, part, part});
      continue;
    }
    const std::vector<Receivers> receivers = planner.receivers(source);
    Wide begin = 0;
    for (const Receivers& r : receivers) {
      begin += Wide{r.range.size()} * r.lacking_before(replica + (r.chunk < chunk ? 1 : 0));
    }
    const Wide line = line_length(receivers, to.replicas());
    moves.push_back({from.owner(source, serving_replica(begin, part.size(), line, from.replicas())), part, part});
  }
  return moves;
}

std::vector<Move> plan_sends(const Layout& from, const Layout& to, int64_t elements, int64_t alignment, int rank) {
  check_rank("plan_sends", rank);
  const Planner planner(from, to, elements, alignment);
  if (rank >= from.ranks()) return {};
  const std::vector<Receivers> receivers = planner.receivers(from.chunk(rank));
  const Wide line = line_length(receivers, to.replicas());

  std::vector<Move> moves;
  Wide begin = 0;
  for (int replica = 0; replica < to.replicas(); ++replica) {
    for (const Receivers& r : receivers) {
      if (!r.lacks(replica)) continue;
      if (serving_replica(begin, r.range.size(), line, from.replicas()) == from.replica(rank)) {
        moves.push_back({to.owner(r.chunk, replica), r.range, r.range});
      }
      begin += r.range.size();
    }
  }
  std::ranges::sort(moves, {}, [](const Move& move) { return std::pair(move.source.begin, move.peer); });
  return moves;
}

}  // namespace tesserae::mesh
