#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/optim/adamw.h"
#include "tests/optim/cut_model.h"
#include "tests/optim/joined_target.h"

// A step of which only some ranks have heard the norm: what recovery from a lost rank builds on.

namespace tesserae::optim {
namespace {

using testing::CutModel;
using testing::JoinedTarget;

/// Shards whose sums over ranks are not computed by the host, and which a rank that is lost takes part in.
class LosingTarget final : public LocalTarget {
 public:
  using LocalTarget::LocalTarget;
  std::optional<c10::Device> device() const override { return c10::kCPU; }
  void sum_on_device(const at::Tensor& /*row*/) override {
    if (loses) throw std::runtime_error("a rank is lost");
  }
  bool loses = false;
};

CutModel model_with_gradients() {
  at::manual_seed(3);
  CutModel model({{"a", at::randn({8, 6})}, {"b", at::randn({10})}, {"c", at::randn({4, 4})}}, 1, 1);
  model.set_gradients({at::randn({8, 6}), at::randn({10}), at::randn({4, 4})});
  return model;
}

void expect_equal(CutModel& a, CutModel& b) {
  const auto expected = a.gather(), got = b.gather();
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

TEST(FinishStep, OfANormThatOthersHaveIsTheStepToTheBit) {
  CutModel whole = model_with_gradients(), late = model_with_gradients();
  LossScaler scaler({.initial = 4}), other({.initial = 4});
  AdamW expected(target_of(whole.rank(0)), {.lr = 0.1});
  const StepResult result = expected.step({.clip_norm = 0.5, .scaler = &scaler});

  const auto target = std::make_shared<JoinedTarget>(late.rank(0));
  target->sum = [](double) -> double { throw std::runtime_error("a rank is lost"); };
  AdamW optimizer(target, {.lr = 0.1});
  const StepOptions options{.clip_norm = 0.5, .scaler = &other};
  EXPECT_THROW(optimizer.step(options), std::runtime_error);
  EXPECT_EQ(optimizer.steps_done(), 0) << "nothing has happened";
  EXPECT_EQ(other.state().good_steps, 0);

  EXPECT_EQ(optimizer.finish_step(result.norm, options).norm, result.norm);
  EXPECT_EQ(optimizer.steps_done(), 1);
  EXPECT_EQ(optimizer.last_step().norm, result.norm);
  EXPECT_EQ(other.state().good_steps, scaler.state().good_steps);
  expect_equal(whole, late);
}

TEST(Step, WhoseNormCannotBeSummedOnTheDeviceIsNoStep) {
  CutModel model = model_with_gradients(), before = model_with_gradients();
  const auto target = std::make_shared<LosingTarget>(model.rank(0));
  AdamW optimizer(target, {.lr = 0.1});
  target->loses = true;
  for (const bool measures : {false, true}) {
    EXPECT_THROW(optimizer.step({.clip_norm = 0.5, .measure_norm = measures}), std::runtime_error);
    EXPECT_EQ(optimizer.steps_done(), 0) << "nothing has happened";
    expect_equal(before, model);
  }
  target->loses = false;
  optimizer.step({.clip_norm = 0.5, .measure_norm = false});
  EXPECT_EQ(optimizer.steps_done(), 1);
}

TEST(FinishStep, OfASkippedStepChangesNothing) {
  CutModel model = model_with_gradients(), before = model_with_gradients();
  LossScaler scaler({.initial = 4});
  AdamW optimizer(target_of(model.rank(0)), {.lr = 0.1});
  EXPECT_TRUE(optimizer.finish_step(std::numeric_limits<double>::quiet_NaN(), {.scaler = &scaler}).skipped);
  EXPECT_EQ(scaler.scale(), 2);
  EXPECT_EQ(optimizer.steps_done(), 1);
  expect_equal(before, model);
}

TEST(Step, ThatIsNotAcceptedChangesNothing) {
  CutModel model = model_with_gradients(), before = model_with_gradients();
  AdamW optimizer(target_of(model.rank(0)), {.lr = 0.1});
  std::vector<double> asked;
  const StepResult refused = optimizer.step({.accept = [&asked](double norm) {
    asked.push_back(norm);
    return false;
  }});
  EXPECT_TRUE(refused.skipped);
  EXPECT_EQ(asked, std::vector<double>{refused.norm});
  EXPECT_TRUE(optimizer.last_step().skipped);
  EXPECT_EQ(optimizer.steps_done(), 1);
  expect_equal(before, model);
  EXPECT_FALSE(optimizer.step({.accept = [](double) { return true; }}).skipped);
}

TEST(Step, ThatCannotTellOthersHasUpdatedEveryShard) {
  CutModel whole = model_with_gradients(), cut_off = model_with_gradients();
  AdamW(target_of(whole.rank(0)), {.lr = 0.1}).step();
  AdamW optimizer(target_of(cut_off.rank(0), [](int) { throw std::runtime_error("a rank is lost"); }), {.lr = 0.1});
  EXPECT_THROW(optimizer.step(), std::runtime_error);
  EXPECT_EQ(optimizer.steps_done(), 1);
  expect_equal(whole, cut_off);
}

/// As a model has that is sharded by rows, once frozen parameters are to be trained.
class GrowingTarget final : public LocalTarget {
 public:
  using LocalTarget::LocalTarget;
  const shard::ShardList& shards() const override { return all; }
  shard::ShardList all = LocalTarget::shards();
};

TEST(FinishStep, ShardsThatComeLaterBeginWithoutAState) {
  CutModel model = model_with_gradients();
  const auto target = std::make_shared<GrowingTarget>(model.rank(0));
  AdamW optimizer(target, {.lr = 0.1});
  optimizer.step();
  shard::Shard thawed = target->all[0];
  thawed.index = static_cast<int>(target->all.size());
  target->all.add(&thawed);
  EXPECT_TRUE(optimizer.dtypes(thawed).empty());
  optimizer.put(thawed, optimizer.take(thawed));
  optimizer.step();
  std::vector<double> steps;
  optimizer.visit_state([&](const shard::Shard&, std::string_view name, at::Tensor& tensor) {
    if (name == "step") steps.push_back(tensor.item<double>());
  });
  ASSERT_EQ(steps.size(), target->all.size());
  EXPECT_EQ(steps.front(), 2);
  EXPECT_EQ(steps.back(), 1);
}

TEST(Optimizer, AComplexParameterIsNamed) {
  CutModel model = model_with_gradients();
  const auto target = std::make_shared<GrowingTarget>(model.rank(0));
  shard::Shard complex = target->all[0];
  complex.master = complex.master.to(at::kComplexFloat);
  target->all.add(&complex);
  EXPECT_THAT([&] { AdamW(target, {.lr = 0.1}); },
              ::testing::ThrowsMessage<InvalidArgument>(::testing::HasSubstr(complex.slices.front().name)));
}

}  // namespace
}  // namespace tesserae::optim
