#include "tesserae/tensor/mlp.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <gmock/gmock.h>

#include "tesserae/base/error.h"
#include "tests/tensor/ranks.h"

namespace tesserae::tensor {
namespace {

using testing::expect_close;
using testing::leaf;
using testing::numbers;
using testing::piece;
using testing::run_parallel;
using testing::whole_of;

constexpr int64_t mlp_width = 6, hidden = 12;

at::Tensor activated(Activation activation, const at::Tensor& x) {
  if (activation == Activation::relu) return at::relu(x);
  if (activation == Activation::silu) return at::silu(x);
  return at::gelu(x, activation == Activation::gelu ? "none" : "tanh");
}

/// The formula, on whole tensors.
struct Whole {
  explicit Whole(const MlpOptions& mlp) : mlp(mlp) {
    const auto parameter = [](const std::string& name, at::IntArrayRef shape) { return leaf(whole_of(name, shape)); };
    gate = parameter("gate.weight", {hidden, mlp_width});
    up = parameter("up.weight", {hidden, mlp_width});
    down = parameter("down.weight", {mlp_width, hidden});
    gate_bias = parameter("gate.bias", {hidden});
    up_bias = parameter("up.bias", {hidden});
    down_bias = parameter("down.bias", {mlp_width});
  }

  at::Tensor forward(const at::Tensor& x) const {
    const auto linear = [&](const at::Tensor& in, const at::Tensor& weight, const at::Tensor& bias) {
      const at::Tensor y = in.matmul(weight.t());
      return mlp.bias ? y.add(bias) : y;
    };
    const at::Tensor upwards = linear(x, up, up_bias);
    const at::Tensor middle = mlp.gated ? activated(mlp.activation, linear(x, gate, gate_bias)).mul(upwards)
                                        : activated(mlp.activation, upwards);
    return linear(middle, down, down_bias);
  }

  MlpOptions mlp;
  at::Tensor gate, up, down, gate_bias, up_bias, down_bias;
};

void compare(const ParallelPtr& parallel, const MlpOptions& mlp, int64_t sequence) {
  SCOPED_TRACE(cat("activation ", static_cast<int>(mlp.activation), mlp.gated ? ", gated" : "",
                   mlp.bias ? ", bias" : "", ", sequence ", sequence, ", ", parallel->size(), " ranks"));
  Mlp split(mlp, LayerOptions{parallel, sequence, at::TensorOptions().dtype(at::kDouble)});
  fill_parameters(*split, testing::fill);
  const auto own = [&](const at::Tensor& t) { return sequence == no_sequence ? t : piece(t, sequence, *parallel); };
  const Whole whole(mlp);
  const at::Tensor x = leaf(numbers({2, 8, mlp_width}, 1)), dy = numbers({2, 8, mlp_width}, 2);
  const at::Tensor expected = whole.forward(x);
  expected.backward(dy);

  const at::Tensor input = leaf(own(x));
  const at::Tensor y = split(input);
  y.backward(own(dy));
  expect_close(y, own(expected), "y");
  expect_close(input.grad(), own(x.grad()), "gradient of x");
  auto parameters = split->named_parameters();
  expect_close(parameters["up.weight"].grad(), piece(whole.up.grad(), 0, *parallel), "gradient of up");
  expect_close(parameters["down.weight"].grad(), piece(whole.down.grad(), 1, *parallel), "gradient of down");
  EXPECT_EQ(parameters.contains("gate.weight"), mlp.gated);
  EXPECT_EQ(parameters.contains("down.bias"), mlp.bias);
  if (mlp.gated) expect_close(parameters["gate.weight"].grad(), piece(whole.gate.grad(), 0, *parallel), "gate");
  if (!mlp.bias) return;
  expect_close(parameters["up.bias"].grad(), piece(whole.up_bias.grad(), 0, *parallel), "gradient of up's bias");
  expect_close(parameters["down.bias"].grad(), whole.down_bias.grad(), "gradient of down's bias");
}

TEST(Mlp, EqualsTheFormulaOnOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    run_parallel(ranks, [](const ParallelPtr& parallel) {
      for (const auto activation : {Activation::relu, Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
        for (const bool gated : {false, true}) {
          for (const bool bias : {false, true}) {
            const MlpOptions mlp{
                .width = mlp_width, .hidden = hidden, .activation = activation, .gated = gated, .bias = bias};
            for (const int64_t sequence : {no_sequence, int64_t{1}}) compare(parallel, mlp, sequence);
          }
        }
      }
    });
  }
}

TEST(Mlp, AHiddenWidthThatCanNotBeCutNamesTheDegreesThatWouldDo) {
  run_parallel(4, [](const ParallelPtr& parallel) {
    try {
      Mlp(MlpOptions{.width = mlp_width, .hidden = 6}, LayerOptions{parallel});
      ADD_FAILURE() << "6 features on 4 ranks";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("the hidden width 6 cannot be cut"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("would do: 1, 2, 3, 6"));
    }
  });
}

}  // namespace
}  // namespace tesserae::tensor
