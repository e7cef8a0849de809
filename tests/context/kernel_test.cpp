#include "tesserae/context/kernel.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/context/numbers.h"

namespace tesserae::context {
namespace {

using testing::apart;
using testing::numbers;

struct Inputs {
  at::Tensor q, k, v, g;
};

Inputs inputs(Shape shape, int64_t kv_heads) {
  const int64_t keys = shape == Shape::full ? 9 : 6;
  return {numbers({2, 4, 6, 8}, 1), numbers({2, kv_heads, keys, 8}, 2), numbers({2, kv_heads, keys, 8}, 3),
          numbers({2, 4, 6, 8}, 4)};
}

class Kernel : public ::testing::TestWithParam<std::tuple<Shape, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(All, Kernel,
                         ::testing::Combine(::testing::Values(Shape::full, Shape::up_to_self, Shape::from_self_on),
                                            ::testing::Values(4, 2, 1)));

// Against autograd through plain products; the kernels of both kinds of devices.
TEST_P(Kernel, IsAttention) {
  const auto [shape, kv_heads] = GetParam();
  const Inputs in = inputs(shape, kv_heads);
  const auto leaf = [](const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v);
  const auto whole = [&](const at::Tensor& x) { return x.repeat_interleave(4 / kv_heads, 1); };
  at::Tensor scores = at::matmul(q, whole(k).transpose(-1, -2)) * 0.3;
  const at::Tensor all = at::ones({6, k.size(2)}, at::TensorOptions().dtype(at::kBool));
  const at::Tensor seen = shape == Shape::full ? all : shape == Shape::up_to_self ? all.tril() : all.triu();
  scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor expected = at::matmul(scores.softmax(-1), whole(v));
  expected.backward(in.g);

  const Attended attended = attend(in.q, in.k, in.v, shape, 0.3);
  EXPECT_LE(apart(attended.out, expected), 1e-12);
  EXPECT_LE(apart(attended.lse, scores.logsumexp(-1)), 1e-12);
  const TileGradients found = attend_backward(in.g, in.q, in.k, in.v, attended.out, attended.lse, shape, 0.3);
  EXPECT_LE(apart(found.queries, q.grad()), 1e-12);
  EXPECT_LE(apart(found.keys, k.grad()), 1e-12);
  EXPECT_LE(apart(found.values, v.grad()), 1e-12);

  if (shape == Shape::from_self_on) return;
  const bool up_to_self = shape == Shape::up_to_self;
  const Attended plain = attend_by_products(in.q, in.k, in.v, up_to_self, 0.3);
  EXPECT_LE(apart(plain.out, expected), 1e-12);
  EXPECT_LE(apart(plain.lse, attended.lse), 1e-12);
  const TileGradients by_products =
      attend_by_products_backward(in.g, in.q, in.k, in.v, plain.out, plain.lse, up_to_self, 0.3);
  EXPECT_LE(apart(by_products.queries, q.grad()), 1e-12);
  EXPECT_LE(apart(by_products.keys, k.grad()), 1e-12);
  EXPECT_LE(apart(by_products.values, v.grad()), 1e-12);
}

}  // namespace
}  // namespace tesserae::context
