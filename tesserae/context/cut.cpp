#include "tesserae/context/cut.h"

#include <algorithm>
#include <cstdlib>

#include "tesserae/base/error.h"

namespace tesserae::context {
namespace {

/// The positions that no rank has yet, end to end and closed to a circle. Places are counted along it.
class Circle {
 public:
  explicit Circle(const Pattern& pattern) : pattern_(pattern) {
    if (pattern.length() > 0) spans_.push_back({0, pattern.length()});
  }

  int64_t size() const {
    int64_t size = 0;
    for (const Span& span : spans_) size += span.size();
    return size;
  }

  int64_t pairs() const { return pairs_before(size()); }

  int64_t pairs_of_arc(int64_t begin, int64_t length) const {
    const int64_t end = begin + length, all = size();
    if (end <= all) return pairs_before(end) - pairs_before(begin);
    return pairs() - pairs_before(begin) + pairs_before(end - all);
  }

  /// Takes the arc out. Ascending spans.
  std::vector<Span> take(int64_t begin, int64_t length) {
    const int64_t end = begin + length, all = size();
    std::vector<Span> taken, left;
    int64_t place = 0;
    for (const Span& span : spans_) {
      const auto part = [&](int64_t from, int64_t to) {  // of this span, by places
        return common(span, {span.begin + from - place, span.begin + to - place});
      };
      const auto keep = [](std::vector<Span>& list, const Span& piece) {
        if (piece.empty()) return;
        if (!list.empty() && list.back().end == piece.begin) {
          list.back().end = piece.end;
        } else {
          list.push_back(piece);
        }
      };
      const int64_t wrapped = std::max<int64_t>(end - all, 0);
      keep(taken, part(0, wrapped));
      keep(left, part(wrapped, begin));
      keep(taken, part(begin, end));
      keep(left, part(end, all));
      place += span.size();
    }
    spans_ = left;
    return taken;
  }

 private:
  int64_t pairs_before(int64_t place) const {
    int64_t pairs = 0;
    for (const Span& span : spans_) {
      const int64_t part = std::min(place, span.size());
      pairs += pattern_.pairs({span.begin, span.begin + part});
      place -= part;
      if (place == 0) break;
    }
    return pairs;
  }

  const Pattern& pattern_;
  std::vector<Span> spans_;
};

/// Where an arc of that length begins whose pairs are nearest to `wanted`.
int64_t find_arc(const Circle& circle, int64_t length, int64_t wanted) {
  const int64_t size = circle.size();
  const auto excess = [&](int64_t begin) { return circle.pairs_of_arc(begin, length) - wanted; };
  // Arcs that do not wrap come first: they make fewer spans.
  std::vector<int64_t> begins;
  for (int64_t begin = 0; begin < size - length; begin += length) begins.push_back(begin);
  begins.push_back(size - length);
  if (length < size) begins.push_back(size);  // the first again, across the end

  int64_t best = 0;
  const auto better = [&](int64_t begin) {
    if (std::llabs(excess(begin % size)) < std::llabs(excess(best))) best = begin % size;
  };
  for (const int64_t begin : begins) better(begin);
  for (size_t i = 1; i < begins.size(); ++i) {
    int64_t low = begins[i - 1], high = begins[i];
    const bool rises = excess(low % size) < 0;
    if (rises == (excess(high % size) < 0)) continue;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      ((excess(middle) < 0) == rises ? low : high) = middle;
    }
    better(low);
    better(high);
    break;
  }
  return best;
}

}  // namespace

Cut::Cut(const Pattern& pattern, int ranks) : pattern_(pattern) {
  if (ranks < 1) throw InvalidArgument("Cut", cat("a sequence cannot be cut over ", ranks, " ranks"));
  Circle circle(pattern_);
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t left = ranks - rank, size = circle.size();
    const int64_t length = (size + left - 1) / left;
    if (left == 1 || length == 0) {
      spans_.push_back(length == 0 ? std::vector<Span>{} : circle.take(0, size));
      continue;
    }
    const auto wanted = static_cast<int64_t>(static_cast<double>(circle.pairs()) * static_cast<double>(length) /
                                             static_cast<double>(size));
    spans_.push_back(circle.take(find_arc(circle, length, wanted), length));
  }
}

int64_t Cut::tokens(int rank) const {
  int64_t tokens = 0;
  for (const Span& span : spans(rank)) tokens += span.size();
  return tokens;
}

int64_t Cut::most_tokens() const {
  return (pattern_.length() + ranks() - 1) / ranks();
}

int64_t Cut::pairs(int rank) const {
  int64_t pairs = 0;
  for (const Span& span : spans(rank)) pairs += pattern_.pairs(span);
  return pairs;
}

}  // namespace tesserae::context
