#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tesserae::tensor {

/// x [..., width] as a matrix [rows, width].
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

/// The shape of x, with another last dimension.
inline std::vector<int64_t> shape_with(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return shape;
}

}  // namespace tesserae::tensor
