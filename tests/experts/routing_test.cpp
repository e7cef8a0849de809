#include "tesserae/experts/routing.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include "tesserae/base/error.h"
#include "tesserae/experts/balance.h"
#include "tests/experts/ranks.h"

namespace tesserae::experts {
namespace {

using ::testing::ElementsAre;
using testing::expect_close;
using testing::leaf;
using testing::numbers;
using testing::run_mesh;

constexpr int64_t routed_width = 6, routed_experts = 5;

Router router_of(RoutingOptions options, const tensor::ParallelPtr& parallel = std::make_shared<tensor::Parallel>()) {
  options.width = routed_width;
  options.experts = routed_experts;
  Router router(options, tensor::LayerOptions{parallel, tensor::no_sequence, at::TensorOptions().dtype(at::kDouble)});
  tensor::fill_parameters(*router, testing::fill);
  return router;
}

std::vector<int64_t> list_from(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(Router, WeightsAreThoseOfThePapers) {
  const at::Tensor x = numbers({7, routed_width}, 1);
  for (const auto scores : {Scores::softmax, Scores::sigmoid}) {
    for (const bool normalised : {false, true}) {
      Router router = router_of({.chosen = 2, .scores = scores, .normalised = normalised, .scale = 1.5});
      const at::Tensor logits = router(x);
      expect_close(logits, x.matmul(router->weight.t()), "logits");
      const Routing routing = router->route(logits);
      const auto [best, choice] = at::topk(logits, 2);
      EXPECT_TRUE(routing.choice.equal(choice));
      at::Tensor expected = scores == Scores::softmax ? at::softmax(logits, -1).gather(1, choice) : best.sigmoid();
      // Mixtral's: the softmax of the chosen logits.
      if (normalised) {
        expected = scores == Scores::softmax ? at::softmax(best, -1) : expected.div(expected.sum(1, true));
      }
      expect_close(routing.weights, expected.mul(1.5), "weights");
      EXPECT_EQ(routing.counts.sum().item<int64_t>(), 14);
      EXPECT_EQ(routing.loss.item<double>(), 0);
    }
  }
}

TEST(Router, OfEqualScoresTheFirstIsChosen) {
  Router router = router_of({.chosen = 3});
  const Routing routing = router->route(at::zeros({2, routed_experts}, at::kDouble));
  EXPECT_THAT(list_from(routing.choice), ElementsAre(0, 1, 2, 0, 1, 2));
  const Routing some = router->route(at::tensor({0.0, 1.0, 0.0, 1.0, 1.0}, at::kDouble).unsqueeze(0));
  EXPECT_THAT(list_from(some.choice), ElementsAre(1, 3, 4));
}

TEST(Router, LossesAreThoseOfTheWholeBatch) {
  const RoutingOptions options{.chosen = 2, .balance_loss = 0.3, .z_loss = 0.2};
  const at::Tensor x = numbers({9, routed_width}, 1);
  // The formulas, on all tokens.
  Router whole = router_of(options);
  const at::Tensor logits = x.matmul(whole->weight.t()), scores = at::softmax(logits, -1);
  const at::Tensor chosen = at::zeros_like(logits).scatter(1, std::get<1>(at::topk(logits, 2)), 1.0);
  const at::Tensor balance = chosen.mean(0).div(2).mul(scores.mean(0)).sum().mul(routed_experts);
  const at::Tensor expected = balance.mul(0.3).add(logits.logsumexp(1).square().mean(), 0.2);
  expected.backward();
  const at::Tensor gradient = whole->weight.grad();
  EXPECT_NEAR(whole->route(whole(x)).loss.item<double>(), expected.item<double>(), 1e-12);

  // Uneven parts, and none at all: means over ranks.
  const std::vector<int64_t> parts{4, 0, 5, 0};
  run_mesh(4, {.expert = 2}, [&](const tensor::ParallelPtr& parallel) {
    comm::MeshFabric& mesh = *parallel->mesh();
    Router router = router_of(options, parallel);
    const at::Tensor own = x.narrow(0, mesh.rank() < 2 ? 4 * mesh.rank() : 4 + 5 * (mesh.rank() - 2),
                                    parts[static_cast<size_t>(mesh.rank())]);
    const at::Tensor loss = router->route(router(own)).loss;
    loss.backward();
    at::Tensor mean = loss.detach().clone().unsqueeze(0), sum = router->weight.grad().clone();
    mesh.job()->everyone().all_reduce(mean);
    mesh.job()->everyone().all_reduce(sum);
    expect_close(mean.div(4), expected.detach().unsqueeze(0), "loss");
    expect_close(sum.div(4), gradient, "gradient of the router");
    router->eval();
    EXPECT_EQ(router->route(router(own)).loss.item<double>(), 0);
  });
}

TEST(Router, BiasesMoveAgainstTheLoadOfAllRanks) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    const int rank = parallel->mesh()->rank();
    auto root = std::make_shared<torch::nn::Module>("Root");
    const RoutingOptions options{.chosen = 1, .bias_rate = 0.1};
    Router first = root->register_module("first", router_of(options, parallel));
    Router second = root->register_module("second", router_of(options, parallel));
    Router other = root->register_module("other", router_of({.chosen = 1}, parallel));
    EXPECT_FALSE(other->bias.defined());
    // Four tokens of rank 0 choose expert 1, six of rank 1 expert 2: a mean of two.
    at::Tensor logits = at::zeros({rank == 0 ? 4 : 6, routed_experts}, at::kDouble);
    logits.select(1, rank + 1).fill_(0.01);
    first->route(logits);
    update_biases(*root);
    const std::vector<double> expected{0.1, -0.1, -0.1, 0.1, 0.1};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_FLOAT_EQ(first->bias[static_cast<int64_t>(i)].item<float>(), static_cast<float>(expected[i])) << i;
    }
    EXPECT_EQ(second->bias.abs().sum().item<double>(), 0) << "nothing was chosen there";
    EXPECT_EQ(first->chosen_since.sum().item<int64_t>(), 0);
    // The bias takes part in the choice, not in the weights.
    const Routing routing = first->route(logits);
    EXPECT_EQ(routing.choice[0][0].item<int64_t>(), 0);
    EXPECT_EQ(routing.weights[0][0].item<double>(), 1);
  });
}

TEST(Router, RefusesWhatCanNotBe) {
  EXPECT_THROW(router_of({.chosen = 6}), InvalidArgument);
  EXPECT_THROW(router_of({.chosen = 0}), InvalidArgument);
  EXPECT_THROW(router_of({.chosen = 1, .z_loss = -1}), InvalidArgument);
}

TEST(Load, AddsUpOverRanks) {
  run_mesh(4, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    const Load own{{1, parallel->mesh()->rank(), 0}, 2, 100};
    const Load all = over_ranks(own, *parallel->mesh());
    EXPECT_THAT(all.tokens, ElementsAre(4, 6, 0));
    EXPECT_EQ(all.dropped, 8);
    EXPECT_EQ(all.bytes, 400u);
    EXPECT_DOUBLE_EQ(all.imbalance(), 1.8);
  });
  EXPECT_EQ(Load{}.imbalance(), 0);
}

}  // namespace
}  // namespace tesserae::experts
