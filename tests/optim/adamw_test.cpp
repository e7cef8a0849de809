#include "tesserae/optim/adamw.h"

#include <ATen/ops/ones.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tesserae/base/error.h"
#include "tests/optim/against_torch.h"

namespace tesserae::optim {
namespace {

using testing::CutModel;

TEST(AdamW, EqualsTorchForEveryCut) {
  for (const int chunks : {1, 2, 3, 8}) {
    for (const size_t parameters_per_unit : {1, 3, 8}) {
      testing::expect_like_torch(
          chunks, parameters_per_unit,
          [](const std::shared_ptr<Target>& target) {
            return std::make_unique<AdamW>(target, AdamWOptions{.lr = 0.05, .beta2 = 0.99, .weight_decay = 0.3});
          },
          [](std::vector<at::Tensor> matrices, std::vector<at::Tensor> vectors) {
            auto options = torch::optim::AdamWOptions(0.05).betas({0.9, 0.99}).eps(1e-8);
            std::vector<torch::optim::OptimizerParamGroup> groups;
            groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(
                                              torch::optim::AdamWOptions(options).weight_decay(0.3)));
            groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(
                                             torch::optim::AdamWOptions(options).weight_decay(0)));
            return std::make_unique<torch::optim::AdamW>(groups, options);
          });
    }
  }
}

TEST(AdamW, StateMovesToAnotherOptimizer) {
  auto train = [](Optimizer& optimizer, CutModel& model, int steps) {
    for (int step = 0; step < steps; ++step) {
      model.set_gradients({at::full({6, 5}, 0.1 * (step + 1)), at::full({3}, 2.0)});
      optimizer.step();
    }
  };
  auto make = [] { return CutModel({{"w", at::ones({6, 5})}, {"b", at::ones({3})}}, 1, 1); };
  CutModel straight = make(), moved = make();
  AdamW uninterrupted(target_of(straight.rank(0))), before(target_of(moved.rank(0))), after(target_of(moved.rank(0)));
  train(uninterrupted, straight, 3);
  train(uninterrupted, straight, 2);
  train(before, moved, 3);

  std::map<std::pair<int, std::string>, at::Tensor> saved;
  before.visit_state([&](const shard::Shard& shard, std::string_view name, at::Tensor& tensor) {
    saved[{shard.index, std::string(name)}] = tensor.clone();
    EXPECT_EQ(tensor.numel(), name == "step" ? 1 : shard.master.numel()) << name;
  });
  EXPECT_EQ(saved.size(), 6u);
  EXPECT_EQ((saved[{1, "step"}].item<float>()), 3.0f);

  int visited = 0;
  after.visit_state([&](const shard::Shard&, std::string_view, at::Tensor&) { ++visited; });
  EXPECT_EQ(visited, 0);
  after.allocate_state();
  after.visit_state([&](const shard::Shard& shard, std::string_view name, at::Tensor& tensor) {
    tensor = saved.at({shard.index, std::string(name)});
  });
  train(after, moved, 2);
  const auto a = straight.gather(), b = moved.gather();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i]));
}

TEST(AdamW, StateOfAnotherSizeIsRefused) {
  CutModel model({{"w", at::ones({8})}}, 1, 1);
  model.set_gradients({at::ones({8})});
  AdamW optimizer(target_of(model.rank(0)));
  optimizer.step();
  auto& shard = model.rank(0)[0];
  shard.master = at::ones({4});
  shard.grad = at::ones({4});
  shard.slices = {{"w", {8}, 0, 4, 0}};
  EXPECT_THROW(optimizer.step(), InvalidArgument);
}

TEST(AdamW, ShardWithoutSlicesIsStillPublished) {
  // Publishing is collective: a rank whose chunk is all padding takes part.
  std::vector<shard::Shard> shards(1);
  shards[0].master = at::ones({4});
  shards[0].grad = at::ones({4});
  int published = 0;
  AdamW optimizer(target_of(shards, [&](int) { ++published; }));
  optimizer.step();
  EXPECT_EQ(published, 1);
  EXPECT_TRUE(shards[0].master.equal(at::ones({4})));
}

TEST(AdamW, LearningRateOfOneStep) {
  CutModel model({{"b", at::ones({4})}}, 1, 1);
  AdamW optimizer(target_of(model.rank(0)), {.lr = 1.0});
  model.set_gradients({at::ones({4})});
  optimizer.step({.lr = 0.25});
  EXPECT_NEAR(model.gather()[0][0].item<double>(), 0.75, 1e-6);  // Adam's first step is lr * sign(gradient)
  optimizer.zero_grad();
  EXPECT_FALSE(model.rank(0)[0].grad.defined());
}

TEST(AdamW, RefusesImpossibleOptions) {
  std::vector<shard::Shard> shards;
  EXPECT_THROW(AdamW(target_of(shards), {.beta1 = 1.0}), InvalidArgument);
  EXPECT_THROW(AdamW(target_of(shards), {.beta2 = -0.1}), InvalidArgument);
  EXPECT_THROW(AdamW(target_of(shards), {.weight_decay = -1}), InvalidArgument);
  for (const double lr : {-1.0, std::nan(""), double{INFINITY}}) {
    EXPECT_THROW(AdamW(target_of(shards), {.lr = lr}), InvalidArgument);
    AdamW optimizer(target_of(shards), {});
    EXPECT_THROW(optimizer.set_lr(lr), InvalidArgument);
    EXPECT_THROW(optimizer.step({.lr = lr}), InvalidArgument);
    EXPECT_THROW(optimizer.step({.clip_norm = std::min(lr, -1.0)}), InvalidArgument);
  }
}

}  // namespace
}  // namespace tesserae::optim
