#include "tesserae/optim/loss_scaler.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <limits>

#include "tesserae/base/error.h"
#include "tesserae/optim/adamw.h"
#include "tests/optim/cut_model.h"
#include "tests/optim/joined_target.h"

namespace tesserae::optim {
namespace {

using testing::CutModel;

TEST(LossScaler, GrowsAfterGoodStepsAndBacksOff) {
  LossScaler scaler({.initial = 8, .growth_interval = 3});
  scaler.update(true);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 16);
  scaler.update(true);
  scaler.update(true);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 8);
  scaler.update(true);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);  // an overflow starts the count anew
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 16);
}

TEST(LossScaler, StopsAtTheMinimum) {
  LossScaler scaler({.initial = 4, .minimum = 2});
  for (int i = 0; i < 5; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 2);
}

TEST(LossScaler, ScalesTheLoss) {
  EXPECT_EQ(LossScaler().scale(at::ones({})).item<float>(), 65536.0f);
}

TEST(LossScaler, StateIsKept) {
  LossScaler scaler({.initial = 8, .growth_interval = 3}), other({.initial = 2, .growth_interval = 3});
  scaler.update(true);
  scaler.update(true);
  other.load_state(scaler.state());
  other.update(true);
  EXPECT_EQ(other.scale(), 16);
}

TEST(LossScaler, StepUnscalesAndClips) {
  // AdamW's first step hides the size of a gradient; its first moment does not.
  CutModel model({{"w", at::ones({4})}}, 1, 1);
  LossScaler scaler({.initial = 1024});
  AdamW optimizer(target_of(model.rank(0)), {.beta1 = 0.9});
  model.set_gradients({at::full({4}, 1024.0 * 3)});
  const auto result = optimizer.step({.clip_norm = 1.5, .scaler = &scaler});
  EXPECT_NEAR(result.norm, 6.0, 1e-6);
  EXPECT_FALSE(result.skipped);
  int seen = 0;
  optimizer.visit_state([&](const shard::Shard&, std::string_view name, at::Tensor& tensor) {
    if (name != "exp_avg") return;
    ++seen;
    EXPECT_NEAR(tensor[0].item<double>(), 0.1 * 0.75, 1e-6);
  });
  EXPECT_EQ(seen, 1);
}

TEST(LossScaler, OverflowSkipsTheStep) {
  CutModel model({{"w", at::ones({4})}}, 1, 1);
  LossScaler scaler;
  AdamW optimizer(target_of(model.rank(0)));
  model.set_gradients({at::full({4}, std::numeric_limits<float>::infinity())});
  EXPECT_TRUE(optimizer.step({.scaler = &scaler}).skipped);
  EXPECT_EQ(scaler.scale(), 32768);
  EXPECT_TRUE(model.gather()[0].equal(at::ones({4})));
}

TEST(LossScaler, AnotherRanksOverflowSkipsTheStepHere) {
  CutModel model({{"w", at::ones({4})}}, 1, 1);
  LossScaler scaler;
  const auto target = std::make_shared<testing::JoinedTarget>(model.rank(0));
  target->sum = [](double) { return std::numeric_limits<double>::infinity(); };
  AdamW optimizer(target);
  model.set_gradients({at::ones({4})});
  EXPECT_TRUE(optimizer.step({.scaler = &scaler}).skipped);
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST(LossScaler, RefusesImpossibleOptions) {
  EXPECT_THROW(LossScaler({.growth = 1}), InvalidArgument);
  EXPECT_THROW(LossScaler({.backoff = 1}), InvalidArgument);
  EXPECT_THROW(LossScaler({.growth_interval = 0}), InvalidArgument);
  EXPECT_THROW(LossScaler({.initial = 1, .minimum = 2}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::optim
