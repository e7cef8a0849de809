#include "tesserae/tensor/unsplit.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "tesserae/shard/sharded.h"
#include "tesserae/shard/unit.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using testing::borrowed;
using testing::leaf;
using testing::numbers;

constexpr int64_t in = 6, out = 10;

struct UnsplitCase {
  std::vector<int64_t> x;
  bool bias;
};

class UnsplitLinear : public ::testing::TestWithParam<UnsplitCase> {};

TEST_P(UnsplitLinear, HasTheNumbersOfTorch) {
  const auto& [shape, has_bias] = GetParam();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor dy = at::linear(numbers(shape, 1), numbers({out, in}, 2)).cos().to(dtype);
    const auto run = [&](const auto& linear) {
      const at::Tensor x = leaf(numbers(shape, 1).to(dtype)), weight = leaf(numbers({out, in}, 2).to(dtype));
      const auto bias = has_bias ? std::optional(leaf(numbers({out}, 3).to(dtype))) : std::nullopt;
      const at::Tensor y = linear(x, weight, bias);
      y.backward(dy);
      std::vector<at::Tensor> seen{y.detach(), x.grad(), weight.grad()};
      if (bias) seen.push_back(bias->grad());
      return seen;
    };
    const auto expected = run([](const auto& x, const auto& w, const auto& b) { return at::linear(x, w, b); });
    const auto got = run([](const auto& x, const auto& w, const auto& b) { return unsplit_linear(x, w, b); });
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << dtype << " " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, UnsplitLinear,
                         ::testing::Values(UnsplitCase{{4, in}, true}, UnsplitCase{{4, in}, false},
                                           UnsplitCase{{2, 3, in}, true}, UnsplitCase{{2, 3, in}, false},
                                           UnsplitCase{{2, 1, 3, in}, true}, UnsplitCase{{in}, true},
                                           UnsplitCase{{0, in}, false}));

TEST(UnsplitLinearOf, FrozenWeightsOrInputsHasTheGradientThatIsAskedFor) {
  const at::Tensor x = numbers({3, in}, 1), weight = numbers({out, in}, 2);
  const at::Tensor moving = leaf(weight);
  unsplit_linear(x, moving, std::nullopt).sum().backward();
  EXPECT_TRUE(moving.grad().defined());
  const at::Tensor input = leaf(x);
  unsplit_linear(input, weight, leaf(numbers({out}, 3))).sum().backward();
  EXPECT_TRUE(at::allclose(input.grad(), weight.sum(0).expand_as(x)));
}

TEST(UnsplitLinearOf, AResultThatIsChangedInPlaceIsDifferentiated) {
  const at::Tensor x = numbers({2, 3, in}, 1), weight = leaf(numbers({out, in}, 2)), bias = leaf(numbers({out}, 3));
  unsplit_linear(x, weight, bias).relu_().sum().backward();
  const at::Tensor other = leaf(weight);
  at::linear(x, other, bias.detach()).relu().sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), other.grad()));
}

TEST(UnsplitLinearOf, AGradientCanBeDifferentiated) {
  const auto second = [](const auto& linear) {
    const at::Tensor x = leaf(numbers({3, in}, 1)), weight = leaf(numbers({out, in}, 2));
    const auto first = torch::autograd::grad({linear(x, weight).tanh().sum()}, {x}, {}, true, /*create_graph=*/true);
    first[0].square().sum().backward();
    return weight.grad();
  };
  const auto ours = [](const at::Tensor& x, const at::Tensor& w) {
    return unsplit_linear(x, w, std::nullopt, Products::widened);
  };
  EXPECT_TRUE(at::allclose(second(ours), second([](const auto& x, const auto& w) { return at::linear(x, w); })));
}

TEST(UnsplitLinearOf, WidenedProductsAreThoseOfProduct) {
  const at::Tensor x = at::randint(-8, 9, {4, 300}).to(at::kBFloat16), weight = at::randint(-8, 9, {7, 300});
  for (const bool learns : {true, false}) {
    const at::Tensor w = weight.to(at::kBFloat16).requires_grad_(learns);
    const at::Tensor y = unsplit_linear(x, w, std::nullopt, Products::widened);
    EXPECT_TRUE(at::equal(y, x.to(at::kDouble).mm(weight.t().to(at::kDouble)).to(at::kBFloat16)));
    EXPECT_EQ(y.requires_grad(), learns);
  }
}

TEST(UnsplitLinearOf, AutocastIsTorchsToDo) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor x = numbers({3, in}, 1).to(at::kFloat), weight = leaf(numbers({out, in}, 2).to(at::kFloat));
  const at::Tensor y = unsplit_linear(x, weight, std::nullopt);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), at::autocast::get_autocast_dtype(at::kCPU));
}

/// A script's model: torch's layers, in two dtypes of index.
class ScriptImpl : public torch::nn::Module {
 public:
  ScriptImpl() {
    const auto options = at::TensorOptions().dtype(at::kDouble);
    table = register_parameter("table", at::empty({7, in}, options));
    weight = register_parameter("weight", at::empty({out, in}, options));
    bias = register_parameter("bias", at::empty({out}, options));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return unsplit_linear(unsplit_embedding(tokens, table, /*padding_index=*/2).tanh(), weight, bias);
  }
  at::Tensor table, weight, bias;
};

TEST(Unsplit, GradientsOfWeightsAreComputedWhereTheyAreReduced) {
  const at::Tensor tokens = at::tensor({3, 0, 2, 6, 3, 2}).view({2, 3});
  ScriptImpl alone;
  fill_parameters(alone, testing::fill);
  const at::Tensor rows = at::embedding(alone.table, tokens, 2).tanh();
  at::linear(rows, alone.weight, alone.bias).square().sum().backward();
  comm::run_local(2, [&](comm::Fabric& fabric) {
    shard::Unit<ScriptImpl> model;
    fill_parameters(*model, testing::fill);
    auto sharded = shard::shard_model(model, borrowed(fabric), {.strategy = {{2, 2, 2}, true, true}});
    for (int step = 1; step <= 2; ++step) {
      sharded.zero_grad();
      model(tokens).square().sum().backward();
      EXPECT_EQ(sharded.statistics().gradients_in_place, 2 * step) << "the table and the weight";
      for (const auto& shard : sharded.shards()) {
        for (const auto& slice : shard.slices) {
          const at::Tensor whole = alone.named_parameters()[slice.name].grad().flatten();
          const int64_t count = slice.end - slice.begin;
          EXPECT_TRUE(at::equal(shard.grad.narrow(0, slice.begin, count), whole.narrow(0, slice.offset, count)));
        }
      }
    }
  });
}

}  // namespace
}  // namespace tesserae::tensor
