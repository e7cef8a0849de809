#include "tesserae/context/tiles.h"

#include <algorithm>

namespace tesserae::context {
namespace {

/// The tiles of a document.
class Document {
 public:
  Document(std::vector<Tile>& list, const Pattern& pattern, int64_t triangle)
      : list_(list),
        causal_(pattern.causal()),
        window_(pattern.window() > 0 ? pattern.window() : pattern.length() + 1),
        triangle_(triangle) {}

  void add(const Span& queries, const Span& keys) {
    if (!causal_) return add_full(queries, keys);
    // So many queries at a time that the two edges of the band do not meet.
    for (Span some{queries.begin, queries.begin}; some.end < queries.end; some.begin = some.end) {
      some.end = std::min(queries.end, some.begin + window_);
      const Span seen = common(keys, {some.begin - window_ + 1, some.end});
      add_left_behind(some, common(seen, {seen.begin, some.end - window_}));
      add_causal(some, common(seen, {some.end - window_, seen.end}));
    }
  }

 private:
  void add_full(const Span& queries, const Span& keys) {
    if (!queries.empty() && !keys.empty()) list_.push_back({queries, keys, Shape::full});
  }

  /// Where query i attends to keys up to i, or from i on.
  void add_triangle(const Span& queries, const Span& keys, Shape shape) {
    if (queries.empty()) return;
    if (triangle_ == 0 || queries.size() <= triangle_) return list_.push_back({queries, keys, shape});
    const int64_t half = (queries.size() + 1) / 2;
    const auto first = [half](const Span& span) { return Span{span.begin, span.begin + half}; };
    const auto second = [half](const Span& span) { return Span{span.begin + half, span.end}; };
    const bool up = shape == Shape::up_to_self;
    add_triangle(first(queries), first(keys), shape);
    add_full(up ? second(queries) : first(queries), up ? first(keys) : second(keys));
    add_triangle(second(queries), second(keys), shape);
  }

  /// Keys that no query's window has left behind: all that counts is who comes first.
  void add_causal(const Span& queries, const Span& keys) {
    const int64_t diagonal = std::max(keys.begin, queries.begin);
    add_full(queries, common(keys, {keys.begin, diagonal}));
    const int64_t end = std::min(queries.end, keys.end);
    add_triangle({diagonal, end}, {diagonal, end}, Shape::up_to_self);
    add_full({std::max(end, queries.begin), queries.end}, {diagonal, end});
  }

  /// Keys that windows leave behind: the first query attends to all of them, query i to those after i - window.
  void add_left_behind(const Span& queries, const Span& keys) {
    if (keys.empty()) return;
    add_full({queries.begin, keys.begin + window_}, keys);
    add_triangle({keys.begin + window_, keys.end + window_ - 1}, {keys.begin + 1, keys.end}, Shape::from_self_on);
  }

  std::vector<Tile>& list_;
  bool causal_;
  int64_t window_, triangle_;
};

}  // namespace

int64_t Tile::pairs() const {
  return shape == Shape::full ? queries.size() * keys.size() : queries.size() * (queries.size() + 1) / 2;
}

std::vector<Tile> tiles(const Pattern& pattern, const Span& queries, const Span& keys, int64_t triangle) {
  std::vector<Tile> list;
  for (const Span& document : pattern.documents_in(queries)) {
    const Span own = common(queries, document), others = common(keys, document);
    if (!others.empty()) Document(list, pattern, triangle).add(own, others);
  }
  return list;
}

}  // namespace tesserae::context
