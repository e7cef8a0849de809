#include "tesserae/context/pattern.h"

#include <algorithm>

#include "tesserae/base/checked.h"

namespace tesserae::context {

Span common(const Span& a, const Span& b) {
  const Span span{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return span.empty() ? Span{span.begin, span.begin} : span;
}

Pattern::Pattern(int64_t length, bool causal, int64_t window, std::vector<int64_t> documents)
    : length_(length), causal_(causal), window_(window), begins_(std::move(documents)) {
  if (length < 0) throw InvalidArgument("Pattern", cat("the length is ", length, "; it must be >= 0"));
  checked_mul(length, length);  // pairs can be counted
  if (window < 0) throw InvalidArgument("Pattern", cat("the window is ", window, "; it must be >= 0 (0: none)"));
  if (window > 0 && !causal) {
    throw InvalidArgument("Pattern", cat("a window of ", window, " goes with causal attention only"));
  }
  if (begins_.empty()) begins_ = {0};
  if (begins_.front() != 0) {
    throw InvalidArgument("Pattern", cat("the first document begins at ", begins_.front(), "; it must begin at 0"));
  }
  pairs_before_.reserve(begins_.size());
  int64_t pairs = 0;
  for (size_t i = 0; i < begins_.size(); ++i) {
    const Span span = document(i);
    if (i + 1 < begins_.size() && span.empty()) {
      throw InvalidArgument("Pattern", cat("documents begin at ", span.begin, " and then at ", span.end,
                                           "; they must be in ascending order"));
    }
    if (span.end < span.begin || (span.empty() && length > 0)) {
      throw InvalidArgument("Pattern", cat("a document begins at ", span.begin, " of a sequence of length ", length));
    }
    pairs_before_.push_back(pairs);
    pairs += pairs_of_first(span.size(), span.size());
  }
}

std::vector<Span> Pattern::documents_in(const Span& span) const {
  std::vector<Span> found;
  if (span.empty()) return found;
  for (size_t i = document_at(span.begin); i < begins_.size() && begins_[i] < span.end; ++i)
    found.push_back(document(i));
  return found;
}

int64_t Pattern::pairs_before(int64_t position) const {
  const size_t index = document_at(position);
  const Span span = document(index);
  return pairs_before_[index] + pairs_of_first(position - span.begin, span.size());
}

int64_t Pattern::pairs_of_first(int64_t queries, int64_t length) const {
  if (!causal_) return queries * length;
  const int64_t growing = window_ > 0 ? std::min(queries, window_) : queries;
  return growing * (growing + 1) / 2 + (queries - growing) * window_;
}

size_t Pattern::document_at(int64_t position) const {
  const auto next = std::ranges::upper_bound(begins_, position);
  return static_cast<size_t>(next - begins_.begin()) - 1;
}

Span Pattern::document(size_t index) const {
  return {begins_[index], index + 1 < begins_.size() ? begins_[index + 1] : length_};
}

std::string to_string(const Pattern& pattern) {
  std::string text = cat(pattern.length(), " tokens, ", pattern.causal() ? "causal" : "full");
  if (pattern.window() > 0) text += cat(", window ", pattern.window());
  if (!pattern.one_document()) text += cat(", ", pattern.documents().size(), " documents");
  return text;
}

}  // namespace tesserae::context
