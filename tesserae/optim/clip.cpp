#include "tesserae/optim/clip.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tesserae::optim {

namespace {

// Rows are short enough for fp32 sums (a long fp32 sum loses digits), and their norms are added up in double. Reducing
// in double at once would first copy the whole gradient to double.
constexpr int64_t kRow = 4096;

at::Tensor sum_of_squares(const at::Tensor& flat) {
  auto squares = [](const at::Tensor& norms) { return norms.to(at::kDouble).square_().sum(); };
  const auto accumulate = flat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t whole = flat.numel() / kRow * kRow;
  const auto rest = at::linalg_vector_norm(flat.slice(0, whole), 2, {}, false, accumulate);
  if (whole == 0) return squares(rest);
  const auto rows = at::linalg_vector_norm(flat.slice(0, 0, whole).view({-1, kRow}), 2, 1, false, accumulate);
  return squares(rows).add_(squares(rest));
}

}  // namespace

double global_norm(const Target& target) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  for (const auto& shard : *target.shards) {
    if (shard.grad.defined() && shard.grad.numel() > 0) sums.push_back(sum_of_squares(shard.grad));
  }
  const double mine = sums.empty() ? 0.0 : at::stack(sums).sum().item<double>();
  return std::sqrt(target.sum_over_chunks(mine));
}

double clip_coefficient(double norm, double max_norm) {
  if (!std::isfinite(norm)) return 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

double clip_gradients(const Target& target, double max_norm) {
  const double norm = global_norm(target);
  const double coefficient = clip_coefficient(norm, max_norm);
  if (coefficient == 1.0) return norm;

  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const auto& shard : *target.shards) {
    if (shard.grad.defined()) grads.push_back(shard.grad);
  }
  if (!grads.empty()) at::_foreach_mul_(grads, coefficient);
  return norm;
}

}  // namespace tesserae::optim
