#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tesserae/tensor/parallel.h"

namespace tesserae::testing {

/// A fabric that its thread owns, for those who want to share it; they end before.
inline std::shared_ptr<comm::Fabric> borrowed(comm::Fabric& fabric) {
  return {&fabric, [](comm::Fabric*) {}};
}

/// A job of one tensor group.
inline std::shared_ptr<comm::MeshFabric> one_group(const std::shared_ptr<comm::Fabric>& job) {
  return std::make_shared<comm::MeshFabric>(job, mesh::Mesh(job->size(), {.tensor = job->size()}));
}

/// Runs `body` as so many tensor-parallel ranks. `piece_bytes`: small, so that tensors are sent in pieces; 0: never.
inline void run_parallel(int ranks, const std::function<void(const std::shared_ptr<tensor::Parallel>&)>& body,
                         int64_t piece_bytes = 0) {
  comm::run_local(
      ranks,
      [&](comm::Fabric& fabric) {
        const auto parallel = std::make_shared<tensor::Parallel>(one_group(borrowed(fabric)));
        if (piece_bytes > 0) parallel->piece_bytes = piece_bytes;
        body(parallel);
      },
      std::chrono::minutes(1));
}

/// The same numbers on every rank.
inline at::Tensor numbers(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble));
}

/// The whole tensor of that name: the numbers of a seed of its own.
inline at::Tensor whole_of(const std::string& name, at::IntArrayRef shape) {
  return numbers(shape, std::hash<std::string>{}(name));
}

/// For fill_parameters: gives every tensor those numbers.
inline void fill(const std::string& name, at::Tensor& whole) {
  whole.copy_(whole_of(name, whole.sizes()));
}

inline at::Tensor leaf(const at::Tensor& x) {
  return x.detach().clone().set_requires_grad(true);
}

inline at::Tensor piece(const at::Tensor& x, int64_t dim, const tensor::Parallel& parallel) {
  const int64_t size = x.size(dim) / parallel.size();
  return x.narrow(dim, parallel.index() * size, size);
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, const char* what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-12 * expected.abs().max().item<double>() + 1e-14)
      << what;
}

}  // namespace tesserae::testing
