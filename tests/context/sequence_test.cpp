#include "tesserae/context/sequence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tesserae/base/error.h"

namespace tesserae::context {
namespace {

void with_sequences(const std::function<void(const Sequence&, comm::Fabric&)>& body) {
  for (const int ranks : {1, 3, 4}) {
    comm::run_local(ranks, [&](comm::Fabric& fabric) {
      const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
      const auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(ranks, {.context = ranks}));
      const auto parallel = std::make_shared<const Parallel>(mesh);
      for (const int64_t length : {2, 10, 33}) body(Sequence(parallel, Pattern(length)), fabric);
    });
  }
}

TEST(Sequence, WholeIsTheReverseOfOwn) {
  with_sequences([](const Sequence& sequence, comm::Fabric& fabric) {
    const int64_t length = sequence.cut().pattern().length();
    const at::Tensor x = at::arange(2 * length * 3, at::kDouble).view({2, length, 3});
    const at::Tensor own = sequence.own(x, 1).clone().set_requires_grad(true);
    EXPECT_TRUE(own.equal(x.index_select(1, sequence.positions(at::kCPU))));
    const at::Tensor whole = sequence.whole(own, -2);
    EXPECT_TRUE(whole.equal(x));
    whole.backward(x.mul(2));
    EXPECT_TRUE(own.grad().equal(sequence.own(x, 1).mul(2 * fabric.size())));
    EXPECT_THROW(sequence.own(x, 2), InvalidArgument);
    EXPECT_THROW(sequence.whole(x.narrow(1, 0, 1).expand({2, length + 1, 3}), 1), InvalidArgument);
  });
}

TEST(Sequence, TheMeanIsOfAllTokens) {
  with_sequences([](const Sequence& sequence, comm::Fabric& fabric) {
    const int64_t length = sequence.cut().pattern().length();
    const at::Tensor losses = at::arange(length, at::kDouble);
    const at::Tensor own = sequence.own(losses, 0).clone().set_requires_grad(true);
    const at::Tensor count = at::full({}, length, at::kLong);
    const at::Tensor mean = sequence.mean(own.sum(), count);
    EXPECT_DOUBLE_EQ(mean.item<double>(), losses.mean().item<double>());
    mean.backward();
    const double each = static_cast<double>(fabric.size()) / static_cast<double>(length);
    EXPECT_TRUE(own.grad().allclose(at::full(own.sizes(), each, at::kDouble)));
  });
}

TEST(Sequence, HasFirstDerivativesOnly) {
  with_sequences([](const Sequence& sequence, comm::Fabric& fabric) {
    if (fabric.size() == 1) return;
    const at::Tensor own =
        sequence.own(at::arange(sequence.cut().pattern().length(), at::kDouble), 0).clone().set_requires_grad(true);
    const at::Tensor mean = sequence.mean(own.sum(), at::full({}, 2, at::kLong));
    EXPECT_THROW(torch::autograd::grad({mean}, {own}, {}, std::nullopt, /*create_graph=*/true), InvalidArgument);
  });
}

}  // namespace
}  // namespace tesserae::context
