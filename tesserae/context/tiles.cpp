#include "tesserae/context/tiles.h"

#include <algorithm>

namespace tesserae::context {
namespace {

void add(std::vector<Tile>& list, const Span& queries, const Span& keys, Shape shape = Shape::full) {
  if (!queries.empty() && !keys.empty()) list.push_back({queries, keys, shape});
}

/// Keys that no query's window has left behind: all that counts is who comes first.
void add_causal(std::vector<Tile>& list, const Span& queries, const Span& keys) {
  const int64_t diagonal = std::max(keys.begin, queries.begin);
  add(list, queries, common(keys, {keys.begin, diagonal}));
  const int64_t end = std::min(queries.end, keys.end);
  add(list, {diagonal, end}, {diagonal, end}, Shape::up_to_self);
  add(list, {std::max(end, queries.begin), queries.end}, {diagonal, end});
}

/// Keys that windows leave behind: the first query attends to all of them, query i to those after i - window.
void add_left_behind(std::vector<Tile>& list, const Span& queries, const Span& keys, int64_t window) {
  if (keys.empty()) return;
  add(list, {queries.begin, keys.begin + window}, keys);
  add(list, {keys.begin + window, keys.end + window - 1}, {keys.begin + 1, keys.end}, Shape::from_self_on);
}

/// Queries and keys of one document.
void add_document(std::vector<Tile>& list, const Pattern& pattern, const Span& queries, const Span& keys) {
  if (!pattern.causal()) return add(list, queries, keys);
  const int64_t window = pattern.window() > 0 ? pattern.window() : pattern.length() + 1;
  // So many queries at a time that the two edges of the band do not meet.
  for (Span some{queries.begin, queries.begin}; some.end < queries.end; some.begin = some.end) {
    some.end = std::min(queries.end, some.begin + window);
    const Span seen = common(keys, {some.begin - window + 1, some.end});
    add_left_behind(list, some, common(seen, {seen.begin, some.end - window}), window);
    add_causal(list, some, common(seen, {some.end - window, seen.end}));
  }
}

}  // namespace

int64_t Tile::pairs() const {
  return shape == Shape::full ? queries.size() * keys.size() : queries.size() * (queries.size() + 1) / 2;
}

std::vector<Tile> tiles(const Pattern& pattern, const Span& queries, const Span& keys) {
  std::vector<Tile> list;
  for (const Span& document : pattern.documents_in(queries)) {
    const Span own = common(queries, document), others = common(keys, document);
    if (!others.empty()) add_document(list, pattern, own, others);
  }
  return list;
}

}  // namespace tesserae::context
