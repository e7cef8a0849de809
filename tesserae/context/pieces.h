#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tesserae/context/cut.h"

namespace tesserae::context {

/// Of tensors [batch, heads, time, width], as attention has them.
inline constexpr int64_t time_dim = 2;

/// A span of positions, and where it begins along the dimension of time of a tensor that holds it.
struct Placed {
  Span positions;
  int64_t at = 0;
};

/// Runs that lie one after the other, as a rank holds them.
std::vector<Placed> end_to_end(const std::vector<Span>& spans);
/// Spans of a tensor that holds every position in its place.
std::vector<Placed> in_place(const std::vector<Span>& spans);

// Between the tensors of ranks, whose spans lie end to end along `dim`, and one that has every position in its place.
// Without autograd.

at::Tensor take(const at::Tensor& whole, const std::vector<Span>& spans, int64_t dim);
void put(const at::Tensor& whole, const at::Tensor& part, const std::vector<Span>& spans, int64_t dim);

/// Pieces [C, ...] of equal length most_tokens() along `dim` (of a piece), as collectives want them: piece r holds rank
/// r's positions of `whole`; what is left over is zero. And back.
at::Tensor to_pieces(const at::Tensor& whole, const Cut& cut, int64_t dim);
at::Tensor from_pieces(const at::Tensor& pieces, const Cut& cut, int64_t dim);

}  // namespace tesserae::context
