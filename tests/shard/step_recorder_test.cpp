#include "tests/shard/step_recorder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::ElementsAre;
using Kind = StepEvent::Kind;

/// The events of some kinds, as a letter and the unit's index.
std::vector<std::string> told(const std::vector<StepEvent>& events, const std::map<Kind, std::string>& letters) {
  std::vector<std::string> text;
  for (const auto& event : events) {
    const auto letter = letters.find(event.kind);
    if (letter != letters.end()) text.push_back(letter->second + std::to_string(event.unit));
  }
  return text;
}

TEST(StepRecorder, TellsWhoIsUsedReducedAndFreedInTheOrderOfAStep) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const NetOptions options{.blocks = 2};
    Net net(options);
    fill_all(*net);
    Options sharding;
    sharding.strategy = mesh::preset("FULL_SHARD", 2);
    Sharded sharded = shard_model(net, share(fabric), sharding);
    const auto recorder = StepRecorder::attach(sharded.engine());
    const Batch batch = batch_of(options, 0, fabric.rank(), 2);
    net(batch.tokens, batch.targets).backward();
    const auto events = recorder->take();
    EXPECT_EQ(recorder->dropped(), 0);
    EXPECT_TRUE(recorder->take().empty());

    EXPECT_THAT(told(events, {{Kind::before_forward, "f"}, {Kind::after_forward, "F"}}),
                ElementsAre("f0", "f1", "F1", "f2", "F2", "F0"));
    EXPECT_THAT(told(events, {{Kind::before_backward, "b"}}), ElementsAre("b0", "b2", "b1"));
    // The root's own gradients end with the embedding's, which comes last.
    EXPECT_THAT(told(events, {{Kind::before_reduce, "r"}, {Kind::end_backward, "e"}}),
                ElementsAre("r2", "r1", "r0", "e0", "e1", "e2"));
    // Nothing is known of the order in a first step: each block is freed after its forward and after its backward.
    EXPECT_THAT(told(events, {{Kind::after_free, "-"}}), ElementsAre("-1", "-2", "-0", "-2", "-1", "-0"));
    int gathers = 0;
    for (size_t i = 0; i < events.size(); ++i) {
      if (i > 0) {
        EXPECT_LE(events[i - 1].time, events[i].time);
      }
      gathers += events[i].kind == Kind::before_gather;
    }
    EXPECT_EQ(gathers, 6) << "each of three units, in forward and in backward";
  });
}

TEST(StepRecorder, KeepsTheNewestAndCountsWhatItDropped) {
  comm::run_local(1, [](comm::Fabric& fabric) {
    const NetOptions options;
    Net net(options);
    fill_all(*net);
    Sharded sharded = shard_model(net, share(fabric), {});
    const auto all = StepRecorder::attach(sharded.engine());
    const auto few = StepRecorder::attach(sharded.engine(), 5);
    const Batch batch = batch_of(options, 0, 0, 1);
    net(batch.tokens, batch.targets).backward();
    const auto everything = all->take(), newest = few->take();
    ASSERT_EQ(newest.size(), 5U);
    EXPECT_EQ(few->dropped(), static_cast<int64_t>(everything.size()) - 5);
    for (size_t i = 0; i < newest.size(); ++i) {
      EXPECT_EQ(newest[i].kind, everything[everything.size() - 5 + i].kind);
      EXPECT_EQ(newest[i].unit, everything[everything.size() - 5 + i].unit);
    }
    few->detach(sharded.engine());
    net(batch.tokens, batch.targets).backward();
    EXPECT_TRUE(few->take().empty());
    EXPECT_FALSE(all->take().empty());
  });
}

TEST(StepRecorder, ChangesNoNumber) {
  const NetOptions options{.nested = true};
  std::vector<Values> values;
  for (const bool recorded : {false, true}) {
    comm::run_local(4, [&](comm::Fabric& fabric) {
      Net net(options);
      fill_all(*net);
      Options sharding;
      sharding.strategy = mesh::preset("ZERO_2", 4);
      Sharded sharded = shard_model(net, share(fabric), sharding);
      if (recorded) StepRecorder::attach(sharded.engine());
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(options, step, fabric.rank(), 4);
        net(batch.tokens, batch.targets).backward();
        sgd(sharded, 0.5);
      }
      Values mine;
      sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) { mine[name] = value.clone(); });
      if (fabric.rank() == 0) values.push_back(mine);
    });
  }
  EXPECT_EQ(worst_difference(values[0], values[1]), 0);
}

TEST(ShardedUnit, SumsOfGradientsAreDividedByWhatIsSaid) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const NetOptions options;
    std::vector<std::vector<at::Tensor>> gradients;
    for (const double divisor : {0.0, 8.0}) {
      Net net(options);
      fill_all(*net);
      Options sharding;
      sharding.strategy = mesh::preset("FULL_SHARD", 2);
      Sharded sharded = shard_model(net, share(fabric), sharding);
      ShardedUnit& block = *sharded.engine().units()[1];
      if (divisor > 0) block.set_gradient_divisor(divisor);
      EXPECT_THROW(block.set_gradient_divisor(0), InvalidArgument);
      const Batch batch = batch_of(options, 0, fabric.rank(), 2);
      net(batch.tokens, batch.targets).backward();
      gradients.emplace_back();
      for (const Shard& shard : sharded.shards()) gradients.back().push_back(shard.grad.clone());
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      const double factor = i == 1 ? 2.0 / 8.0 : 1.0;  // one flat buffer a unit
      EXPECT_TRUE(at::equal(gradients[0][i].mul(factor), gradients[1][i])) << "shard " << i;
    }
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
