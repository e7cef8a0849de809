#pragma once

#include <ATen/core/Tensor.h>

#include "tesserae/context/tiles.h"

namespace tesserae::context {

// Attention of one tile, below autograd: torch's kernels, which give besides the output what it takes to add that of
// other keys (FlashAttention, Dao et al., 2022, arXiv:2205.14135). Queries [batch, heads, queries, width], keys and
// values [batch, heads of keys and values, keys, width], neither empty; heads is a multiple of the others' (grouped
// queries).

/// The largest triangle that is worth one call on this kind of device (tiles.h). The CPU's kernel computes blocks of
/// 512 keys also above the diagonal: a triangle of 512 queries takes as long as the square. 0: as large as it is.
int64_t largest_triangle(c10::Device device);

/// Of these keys alone: `out` [as queries], `lse` [batch, heads, queries], the logarithm of the sum of exponentials
/// (fp32; fp64 for fp64).
struct Attended {
  at::Tensor out, lse;
};
Attended attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, Shape shape, double scale);

/// Of the gradient of `out` what these keys contribute, where `out` and `lse` are those of all keys together.
struct TileGradients {
  at::Tensor queries, keys, values;
};
TileGradients attend_backward(const at::Tensor& gradient, const at::Tensor& queries, const at::Tensor& keys,
                              const at::Tensor& values, const at::Tensor& out, const at::Tensor& lse, Shape shape,
                              double scale);

// What attend() does on devices for which torch has no such kernel: products and a softmax in fp32. Here to be tested.
Attended attend_by_products(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                            bool up_to_self, double scale);
TileGradients attend_by_products_backward(const at::Tensor& gradient, const at::Tensor& queries, const at::Tensor& keys,
                                          const at::Tensor& values, const at::Tensor& out, const at::Tensor& lse,
                                          bool up_to_self, double scale);

}  // namespace tesserae::context
