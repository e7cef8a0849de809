#include "tesserae/optim/clip.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::optim {

namespace {

// Rows are short enough for fp32 sums (a long fp32 sum loses digits), and their norms are added up in double. Reducing
// in double at once would first copy the whole gradient to double.
constexpr int64_t kRow = 4096;

c10::ScalarType accumulated_in(const at::Tensor& flat) {
  return flat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Of each row of the first `elements`; block by block where they are paged.
at::Tensor norms_of_rows(const at::Tensor& flat, int64_t elements, double p) {
  std::vector<at::Tensor> norms;
  offload::in_runs({{flat, offload::Access::read}}, elements, [&](int64_t begin, int64_t end) {
    const at::Tensor run = offload::part(flat, begin, end);
    norms.push_back(at::linalg_vector_norm(run.view({-1, kRow}), p, 1, false, accumulated_in(flat)));
  });
  return norms.size() == 1 ? norms.front() : at::cat(norms);
}

// The sum of |x|^p, a double scalar; for p = infinity the largest |x|.
at::Tensor sum_of_powers(const at::Tensor& flat, double p) {
  const int64_t whole = flat.numel() / kRow * kRow;
  const at::Tensor rest = flat.slice(0, whole);
  const offload::Use use(rest, offload::Access::read);
  if (std::isinf(p) && rest.numel() == 0) return norms_of_rows(flat, whole, p).max().to(at::kDouble);
  const at::Tensor of_rest = at::linalg_vector_norm(rest, p, {}, false, accumulated_in(flat)).to(at::kDouble);
  if (std::isinf(p)) {
    return whole == 0 ? of_rest : at::maximum(norms_of_rows(flat, whole, p).max().to(at::kDouble), of_rest);
  }
  const auto powers = [p](const at::Tensor& norms) { return norms.to(at::kDouble).pow_(p).sum(); };
  if (whole == 0) return powers(of_rest);
  return powers(norms_of_rows(flat, whole, p)).add_(powers(of_rest));
}

// What of a shard this rank counts: all of it, or what tensor-parallel ranks hold parts of, in as few runs as there can
// be. Padding is zero.
std::vector<at::Tensor> counted(const shard::Shard& shard, const Target& target) {
  if (!shard.grad.defined() || shard.grad.numel() == 0) return {};
  if (target.counts_repeated()) return {shard.grad};
  std::vector<at::Tensor> runs;
  const shard::Slice* first = nullptr;
  const shard::Slice* last = nullptr;
  const auto close = [&] {
    if (first != nullptr) runs.push_back(shard.grad.slice(0, first->begin, last->end));
    first = nullptr;
  };
  for (const auto& slice : shard.slices) {
    if (slice.split.along(mesh::Axis::tensor).whole()) {
      close();
      continue;
    }
    if (first == nullptr) first = &slice;
    last = &slice;
  }
  close();
  return runs;
}

// What each of this rank's chunks adds to the sum of |x|^p; for p = infinity, its largest magnitude.
std::vector<at::Tensor> parts_of(const Target& target, double p) {
  std::vector<at::Tensor> parts;
  for (const auto& shard : target.shards()) {
    for (const auto& run : counted(shard, target)) {
      at::Tensor part = sum_of_powers(run, p);
      parts.push_back(std::isinf(p) ? part : part.mul_(1.0 / shard.replicas));
    }
  }
  return parts;
}

// The sum of `parts`, and `also`, in a row on the device: numbers of the host come there as arguments of kernels.
at::Tensor row_on_device(const Target& target, const std::vector<at::Tensor>& parts, const std::vector<double>& also) {
  const auto count = static_cast<int64_t>(also.size()) + 1;
  const at::Tensor row = at::zeros({count}, at::TensorOptions().dtype(at::kDouble).device(*target.device()));
  if (!parts.empty()) row.select(0, 0).copy_(at::stack(parts).sum());
  for (int64_t i = 1; i < count; ++i) row.select(0, i).fill_(also[static_cast<size_t>(i - 1)]);
  return row;
}

}  // namespace

double global_norm(Target& target, double p, std::vector<double>* also) {
  if (!(p > 0)) throw InvalidArgument("global_norm", cat("a norm of order ", p, ": it must be above 0"));
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> parts = parts_of(target, p);
  if (std::isinf(p)) return target.max_over_chunks(parts.empty() ? 0.0 : at::stack(parts).max().item<double>());
  if (target.device()) {
    const at::Tensor sums =
        target.sum_on_host(row_on_device(target, parts, also != nullptr ? *also : std::vector<double>{}));
    const double* const data = sums.const_data_ptr<double>();
    if (also != nullptr) also->assign(data + 1, data + sums.numel());
    return std::pow(data[0], 1 / p);
  }
  const double mine = parts.empty() ? 0.0 : at::stack(parts).sum().item<double>();
  return std::pow(target.sum_over_chunks(mine, also), 1 / p);
}

at::Tensor norm_on_device(Target& target) {
  const at::NoGradGuard no_grad;
  const at::Tensor row = row_on_device(target, parts_of(target, 2), {});
  target.sum_on_device(row);
  return row.select(0, 0).sqrt();
}

double clip_coefficient(double norm, double max_norm) {
  if (!std::isfinite(norm)) return 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

double clip_gradients(Target& target, double max_norm) {
  const double norm = global_norm(target);
  const double coefficient = clip_coefficient(norm, max_norm);
  if (coefficient == 1.0) return norm;

  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const auto& shard : target.shards()) {
    if (offload::is_paged(shard.grad)) {
      offload::in_runs({{shard.grad, offload::Access::update}}, shard.grad.numel(),
                       [&](int64_t begin, int64_t end) { shard.grad.slice(0, begin, end).mul_(coefficient); });
    } else if (shard.grad.defined()) {
      grads.push_back(shard.grad);
    }
  }
  if (!grads.empty()) at::_foreach_mul_(grads, coefficient);
  return norm;
}

}  // namespace tesserae::optim
