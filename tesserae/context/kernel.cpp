#include "tesserae/context/kernel.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>

#include "tesserae/base/checked.h"

namespace tesserae::context {
namespace {

/// Every head of queries with keys of its own, a view or a copy.
at::Tensor repeated(const at::Tensor& x, int64_t heads) {
  const int64_t times = heads / x.size(1);
  return times == 1 ? x : x.unsqueeze(2).expand({-1, -1, times, -1, -1}).flatten(1, 2);
}

/// The reverse, for gradients.
at::Tensor summed_to(const at::Tensor& x, int64_t heads) {
  const int64_t times = x.size(1) / heads;
  return times == 1 ? x : x.unflatten(1, {heads, times}).sum(2);
}

at::Tensor scores(const at::Tensor& queries, const at::Tensor& keys, bool up_to_self, double scale) {
  at::Tensor scores = at::matmul(queries.mul(scale), keys.transpose(-1, -2));
  if (up_to_self) {
    const auto later = at::ones({queries.size(2), keys.size(2)}, scores.options().dtype(at::kBool)).triu_(1);
    scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

// CUDA's kernel wants the sums of exponentials of a multiple of so many queries.
constexpr int64_t lse_multiple = 32;

Attended attend_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool up_to_self, double scale) {
  if (q.is_cpu()) {
    const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, up_to_self, {}, scale);
    return {out, lse};
  }
  if (q.is_cuda() && q.scalar_type() != at::kDouble) {
    const int64_t heads = q.size(1);
    const auto result =
        at::_scaled_dot_product_efficient_attention(q, repeated(k, heads), repeated(v, heads), {},
                                                    /*compute_log_sumexp=*/true, 0.0, up_to_self, scale);
    return {std::get<0>(result), std::get<1>(result).narrow(2, 0, q.size(2))};
  }
  return attend_by_products(q, k, v, up_to_self, scale);
}

TileGradients attend_backward_of(const at::Tensor& g, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& out, const at::Tensor& lse, bool up_to_self, double scale) {
  if (q.is_cpu()) {
    const auto [dq, dk, dv] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, up_to_self, {}, scale);
    return {dq, dk, dv};
  }
  if (q.is_cuda() && q.scalar_type() != at::kDouble) {
    const int64_t heads = q.size(1), kv_heads = k.size(1), queries = q.size(2);
    const at::Tensor padded = at::constant_pad_nd(lse, {0, round_up(queries, lse_multiple) - queries}).contiguous();
    const at::Tensor none = at::empty({}, at::TensorOptions().dtype(at::kLong));  // no dropout: no random state
    const auto result = at::_scaled_dot_product_efficient_attention_backward(
        g, q, repeated(k, heads), repeated(v, heads), /*attn_bias=*/{}, out, padded, none, none, 0.0,
        {true, true, true, false}, up_to_self, scale);
    return {std::get<0>(result), summed_to(std::get<1>(result), kv_heads), summed_to(std::get<2>(result), kv_heads)};
  }
  return attend_by_products_backward(g, q, k, v, out, lse, up_to_self, scale);
}

}  // namespace

int64_t largest_triangle(c10::Device device) {
  return device.is_cpu() ? 128 : 0;
}

// Read backwards, "itself and those behind" is "itself and those before".
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Shape shape, double scale) {
  if (shape != Shape::from_self_on) return attend_forward(q, k, v, shape == Shape::up_to_self, scale);
  const Attended reversed = attend_forward(q.flip(2), k.flip(2), v.flip(2), true, scale);
  return {reversed.out.flip(2), reversed.lse.flip(2)};
}

TileGradients attend_backward(const at::Tensor& g, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& out, const at::Tensor& lse, Shape shape, double scale) {
  if (shape != Shape::from_self_on) {
    return attend_backward_of(g, q, k, v, out, lse, shape == Shape::up_to_self, scale);
  }
  const TileGradients reversed =
      attend_backward_of(g.flip(2), q.flip(2), k.flip(2), v.flip(2), out.flip(2), lse.flip(2), true, scale);
  return {reversed.queries.flip(2), reversed.keys.flip(2), reversed.values.flip(2)};
}

Attended attend_by_products(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                            bool up_to_self, double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::toOpMathType(queries.scalar_type());
  const int64_t heads = queries.size(1);
  const at::Tensor all = scores(queries.to(dtype), repeated(keys, heads).to(dtype), up_to_self, scale);
  const at::Tensor lse = all.logsumexp(-1);
  const at::Tensor shares = all.sub(lse.unsqueeze(-1)).exp_();
  return {at::matmul(shares, repeated(values, heads).to(dtype)).to(queries.scalar_type()), lse};
}

TileGradients attend_by_products_backward(const at::Tensor& gradient, const at::Tensor& queries, const at::Tensor& keys,
                                          const at::Tensor& values, const at::Tensor& out, const at::Tensor& lse,
                                          bool up_to_self, double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = at::toOpMathType(queries.scalar_type());
  const int64_t heads = queries.size(1), kv_heads = keys.size(1);
  const at::Tensor g = gradient.to(dtype), q = queries.to(dtype);
  const at::Tensor k = repeated(keys, heads).to(dtype), v = repeated(values, heads).to(dtype);
  const at::Tensor shares = scores(q, k, up_to_self, scale).sub_(lse.unsqueeze(-1)).exp_();
  const at::Tensor dv = at::matmul(shares.transpose(-1, -2), g);
  const at::Tensor mean = g.mul(out.to(dtype)).sum(-1, /*keepdim=*/true);
  const at::Tensor ds = at::matmul(g, v.transpose(-1, -2)).sub_(mean).mul_(shares).mul_(scale);
  const auto type = queries.scalar_type();
  return {at::matmul(ds, k).to(type), summed_to(at::matmul(ds.transpose(-1, -2), q), kv_heads).to(type),
          summed_to(dv, kv_heads).to(type)};
}

}  // namespace tesserae::context
