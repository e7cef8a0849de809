#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tesserae::context {

/// Positions [begin, end) of a sequence.
struct Span {
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Span&) const = default;
};

/// What two spans have in common; empty if nothing.
Span common(const Span& a, const Span& b);

/// Which positions of a sequence attend to which: those of the same document, up to themselves if it is causal, and of
/// these the last `window`. A value. A *pair* is a query and a key that it attends to: what attention costs.
class Pattern {
 public:
  /// `window` > 0: each position attends to so many at most, itself among them; causal patterns only. `documents`:
  /// where documents that are packed into the sequence begin, ascending, the first at 0; none: it is one document.
  /// Throws InvalidArgument.
  explicit Pattern(int64_t length, bool causal = true, int64_t window = 0, std::vector<int64_t> documents = {});

  int64_t length() const { return length_; }
  bool causal() const { return causal_; }
  int64_t window() const { return window_; }  ///< 0: none
  bool one_document() const { return begins_.size() == 1; }
  const std::vector<int64_t>& documents() const { return begins_; }

  /// The documents that have positions in `span`, ascending.
  std::vector<Span> documents_in(const Span& span) const;

  /// Pairs of the queries in `span`.
  int64_t pairs(const Span& span) const { return pairs_before(span.end) - pairs_before(span.begin); }

  bool operator==(const Pattern&) const = default;

 private:
  int64_t pairs_before(int64_t position) const;
  int64_t pairs_of_first(int64_t queries, int64_t length) const;  // of the first queries of a document
  size_t document_at(int64_t position) const;
  Span document(size_t index) const;

  int64_t length_;
  bool causal_;
  int64_t window_;
  std::vector<int64_t> begins_;
  std::vector<int64_t> pairs_before_;  // of each document
};

std::string to_string(const Pattern& pattern);

}  // namespace tesserae::context
