#include "tesserae/tensor/product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "tesserae/autograd/gradient_hooks.h"

namespace tesserae::tensor {
namespace {

// Whether oneDNN, which torch gives such products to, has no kernels for this CPU.
bool multiplies_by_scalars() {
#if defined(__x86_64__)
  static const bool scalar =
      !(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  return scalar;
#else
  return false;
#endif
}

bool widens(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && b.scalar_type() == a.scalar_type() && widens_products(a.scalar_type());
}

}  // namespace

bool widens_products(at::ScalarType dtype) {
  return (dtype == at::kBFloat16 || dtype == at::kHalf) && multiplies_by_scalars();
}

void widened_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool kept, int64_t block_bytes) {
  // out^T = b^T a^T: the blocks are rows of the larger operand.
  if (a.size(0) < b.size(1)) return widened_product(out.t(), b.t(), a.t(), kept, block_bytes);
  const at::Tensor whole = b.to(at::kFloat);
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) * std::max<int64_t>(1, a.size(1) + b.size(1));
  const int64_t rows = std::max<int64_t>(1, block_bytes / row_bytes);
  for (int64_t begin = 0; begin < a.size(0); begin += rows) {
    const int64_t count = std::min(rows, a.size(0) - begin);
    const at::Tensor part = a.narrow(0, begin, count).to(at::kFloat), to = out.narrow(0, begin, count);
    at::Tensor sum = kept ? to.to(at::kFloat) : at::empty_like(to, at::kFloat);  // in the order of `to`
    to.copy_(kept ? sum.addmm_(part, whole) : at::mm_out(sum, part, whole));
  }
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (!widens(a, b)) return a.mm(b);
  const at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  widened_product(out, a, b, false);
  return out;
}

void product_to(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (widens(a, b)) return widened_product(out, a, b, false);
  at::Tensor to = out;
  at::mm_out(to, a, b);
}

void add_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (widens(a, b)) return widened_product(out, a, b, true);
  out.addmm_(a, b);
}

at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x, Products products) {
  at::Tensor destination = autograd::gradient_destination(weight);
  if (!destination.defined()) return products == Products::widened ? product(dy.t(), x) : dy.t().mm(x);
  if (products == Products::as_torch) return at::mm_out(destination, dy.t(), x);
  product_to(destination, dy.t(), x);
  return destination;
}

}  // namespace tesserae::tensor
