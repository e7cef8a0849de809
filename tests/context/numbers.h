#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

namespace tesserae::context::testing {

/// The same on every rank.
inline at::Tensor numbers(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

inline double apart(const at::Tensor& actual, const at::Tensor& expected) {
  return expected.numel() == 0 ? 0.0 : (actual - expected).abs().max().item<double>();
}

}  // namespace tesserae::context::testing
