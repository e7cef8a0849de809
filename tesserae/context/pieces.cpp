#include "tesserae/context/pieces.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace tesserae::context {

std::vector<Placed> end_to_end(const std::vector<Span>& spans) {
  std::vector<Placed> placed;
  int64_t at = 0;
  for (const Span& span : spans) {
    placed.push_back({span, at});
    at += span.size();
  }
  return placed;
}

std::vector<Placed> in_place(const std::vector<Span>& spans) {
  std::vector<Placed> placed;
  for (const Span& span : spans) placed.push_back({span, span.begin});
  return placed;
}

at::Tensor take(const at::Tensor& whole, const std::vector<Span>& spans, int64_t dim) {
  int64_t tokens = 0;
  for (const Span& span : spans) tokens += span.size();
  std::vector<int64_t> shape = whole.sizes().vec();
  shape[static_cast<size_t>(dim)] = tokens;
  at::Tensor part = at::empty(shape, whole.options());
  for (const auto& [span, at] : end_to_end(spans)) {
    part.narrow(dim, at, span.size()).copy_(whole.narrow(dim, span.begin, span.size()));
  }
  return part;
}

void put(const at::Tensor& whole, const at::Tensor& part, const std::vector<Span>& spans, int64_t dim) {
  for (const auto& [span, at] : end_to_end(spans)) {
    whole.narrow(dim, span.begin, span.size()).copy_(part.narrow(dim, at, span.size()));
  }
}

at::Tensor to_pieces(const at::Tensor& whole, const Cut& cut, int64_t dim) {
  std::vector<int64_t> shape = whole.sizes().vec();
  shape[static_cast<size_t>(dim)] = cut.most_tokens();
  shape.insert(shape.begin(), cut.ranks());
  at::Tensor pieces = at::zeros(shape, whole.options());
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    for (const auto& [span, at] : end_to_end(cut.spans(rank))) {
      pieces[rank].narrow(dim, at, span.size()).copy_(whole.narrow(dim, span.begin, span.size()));
    }
  }
  return pieces;
}

at::Tensor from_pieces(const at::Tensor& pieces, const Cut& cut, int64_t dim) {
  std::vector<int64_t> shape = pieces.sizes().slice(1).vec();
  shape[static_cast<size_t>(dim)] = cut.pattern().length();
  at::Tensor whole = at::empty(shape, pieces.options());
  for (int rank = 0; rank < cut.ranks(); ++rank) put(whole, pieces[rank], cut.spans(rank), dim);
  return whole;
}

}  // namespace tesserae::context
