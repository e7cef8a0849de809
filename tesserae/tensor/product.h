#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tesserae::tensor {

/// a [m, k] times b [k, n], in the dtype of both. As torch does it, but for bf16 and fp16 on an x86 CPU without
/// AVX-512: torch multiplies those in scalar code there (up to a hundred times slower than fp32), so they are
/// multiplied in fp32 and rounded once. Deterministic; below autograd: made for the nodes of this layer.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

/// The same into `out` [m, n], of the same dtype and any strides.
void product_to(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

/// The same, added to `out`. In fp32 copies, sum and product are rounded together, once.
void add_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

/// Whether these multiply operands of `dtype` on this CPU in fp32 copies.
bool widens_products(at::ScalarType dtype);

/// How a layer multiplies: as product() does, or as torch does.
enum class Products { widened, as_torch };

/// The gradient dy^T x [out, in] of `weight` in y = x weight^T, for dy [rows, out] and x [rows, in]: computed where it
/// will be reduced (autograd::gradient_destination), if that place is to be had.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x, Products products);

/// What these do on such CPUs: `out` = `kept` x `out` + a b by fp32 copies. The operand that is larger in its outer
/// dimension is copied block by block, so the copies take no more than the smaller one and `block_bytes`.
inline constexpr int64_t kProductBlockBytes = int64_t{4} << 20;
void widened_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool kept,
                     int64_t block_bytes = kProductBlockBytes);

}  // namespace tesserae::tensor
