#pragma once

#include <cstdint>
#include <vector>

#include "tesserae/context/pattern.h"

namespace tesserae::context {

/// Which positions of a sequence each of C ranks has. A value: the same on every rank.
///
/// Every rank has as many tokens as the others (one more or less), and as many attended pairs: so linear layers,
/// memory and attention are shared out evenly at once, without padding, for documents of any lengths. What it takes:
/// lay the positions that are left on a circle; of all arcs of length `tokens / C`, starting anywhere, the pairs are on
/// average `pairs / C`, and moving the start by one changes them by at most one query's. So some arc has just what a
/// rank is due. It is cut out, what is left is closed to a circle again, and so on. Each arc has two ends, so there are
/// at most 2 C - 1 spans in all (two beads on a necklace: Alon and West, 1986, Proc. AMS 98). For one causal document
/// over two ranks that is what is known as the zigzag order.
class Cut {
 public:
  /// Throws InvalidArgument for ranks < 1.
  Cut(const Pattern& pattern, int ranks);

  const Pattern& pattern() const { return pattern_; }
  int ranks() const { return static_cast<int>(spans_.size()); }

  /// Those of a rank, ascending, none empty; of all ranks together: every position once. A rank has none if there are
  /// fewer tokens than ranks.
  const std::vector<Span>& spans(int rank) const { return spans_.at(static_cast<size_t>(rank)); }
  int64_t tokens(int rank) const;
  int64_t most_tokens() const;  ///< that any rank has: ceil(length / C)
  int64_t pairs(int rank) const;

 private:
  Pattern pattern_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace tesserae::context
