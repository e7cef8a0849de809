#pragma once

#include <vector>

#include "tesserae/context/pattern.h"

namespace tesserae::context {

/// Which keys the queries of a tile attend to.
enum class Shape {
  full,         ///< all
  up_to_self,   ///< as many queries as keys: the i-th query to keys 0 ... i
  from_self_on  ///< as many queries as keys: the i-th query to keys i, i + 1, ...: the trailing edge of a window
};

/// A part of a pattern that one call of an attention kernel computes, without a mask.
struct Tile {
  Span queries, keys;  ///< by position
  Shape shape = Shape::full;

  int64_t pairs() const;
  bool operator==(const Tile&) const = default;
};

/// The pairs of `queries` with `keys`, each in exactly one tile. Ascending by the first query. `triangle` > 0: tiles on
/// the diagonal have so many queries at most; a larger triangle is two halves and the square between them.
std::vector<Tile> tiles(const Pattern& pattern, const Span& queries, const Span& keys, int64_t triangle = 0);

}  // namespace tesserae::context
