#include "tesserae/monitor/step_timer.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <thread>

#include "tests/shard/net.h"

namespace tesserae::monitor {
namespace {

using namespace shard::testing;
using std::chrono::milliseconds;

struct Watched {
  explicit Watched(comm::Fabric& fabric, int ranks, const NetOptions& options = {}) : net(options) {
    fill_all(*net);
    shard::Options sharding;
    sharding.strategy = mesh::preset("FULL_SHARD", ranks);
    sharded.emplace(shard::shard_model(net, share(fabric), sharding));
    timer->attach(sharded->engine());
  }
  void step(int64_t number, int rank, int ranks) {
    const Batch batch = batch_of(net->options, number, rank, ranks);
    net(batch.tokens, batch.targets).backward();
    sgd(*sharded, 0.1);
  }

  Net net;
  std::optional<shard::Sharded> sharded;
  std::shared_ptr<StepTimer> timer = std::make_shared<StepTimer>();
};

/// As a layer would, in a forward that is an evaluation.
struct CountsInForward final : shard::StepObserver {
  void before_forward(shard::ShardedUnit& /*unit*/) override { count_work(Work::pairs, 12345); }
};

double sum(const PerStage& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}
double at(const StepTimes& times, Stage stage) {
  return times.seconds[static_cast<size_t>(stage)];
}

TEST(StepTimer, AtEachMomentOfAStepTheRankIsInOneStage) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    for (int step = 1; step <= 3; ++step) {
      model.timer->enter(Stage::data);
      os::sleep_for(milliseconds(20));
      model.timer->enter(Stage::forward);
      model.step(step, fabric.rank(), 2);
      model.timer->enter(Stage::optimizer);
      os::sleep_for(milliseconds(30));
      model.timer->end_step(step);
    }
    const std::vector<StepTimes> steps = model.timer->steps();
    ASSERT_EQ(steps.size(), 3U);
    for (const StepTimes& times : steps) {
      EXPECT_NEAR(sum(times.seconds), times.total, 1e-6);
      EXPECT_GE(at(times, Stage::data), 0.020);
      EXPECT_GE(at(times, Stage::optimizer), 0.030);
      EXPECT_GT(at(times, Stage::forward), 0);
      EXPECT_GT(at(times, Stage::backward), 0);
      EXPECT_GE(times.off_processor[static_cast<size_t>(Stage::data)], 0.015) << "it slept";
    }
    EXPECT_EQ(steps.back().step, 3);
  });
}

// The one that is late works longer, the other waits as long: that is how they are told apart.
TEST(StepTimer, WhatARankWaitsIsNotWhatItWorks) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    for (int step = 1; step <= 2; ++step) {
      model.timer->enter(Stage::data);
      if (fabric.rank() == 1) os::sleep_for(milliseconds(100));
      model.timer->enter(Stage::forward);
      model.step(step, fabric.rank(), 2);
      model.timer->end_step(step);
    }
    const StepTimes times = model.timer->steps().back();
    double waiting = 0;
    for (const Stage stage : {Stage::gather, Stage::reduce, Stage::agree}) waiting += at(times, stage);
    if (fabric.rank() == 0) {
      EXPECT_GE(waiting, 0.05);
      EXPECT_LT(at(times, Stage::data), 0.05);
    } else {
      EXPECT_GE(at(times, Stage::data), 0.1);
    }
  });
}

TEST(StepTimer, ARunMayGoBack) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    for (int step = 1; step <= 4; ++step) {
      model.step(step, fabric.rank(), 2);
      model.timer->end_step(step);
    }
    model.timer->go_back(2);
    EXPECT_EQ(model.timer->now().step, 3);
    EXPECT_EQ(model.timer->steps().size(), 2U);
    model.timer->keep(3, 3);
    EXPECT_FALSE(model.timer->take_kept()) << "it was undone";
    model.step(3, fabric.rank(), 2);
    model.timer->end_step(3);
    EXPECT_EQ(model.timer->steps(2).size(), 1U);
    EXPECT_EQ(model.timer->take_kept().value().size(), 1U);
  });
}

TEST(StepTimer, WithoutBeingToldAStepEndsWhereTheNextBegins) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    int ended = 0;
    model.timer->at_end_of_step([&ended] { ++ended; });
    for (int step = 1; step <= 4; ++step) {
      {
        // An accumulation, and evaluations in between.
        const shard::NoSync no_sync(model.sharded->engine());
        const Batch batch = batch_of(model.net->options, step, fabric.rank(), 2);
        model.net(batch.tokens, batch.targets).backward();
      }
      model.step(step, fabric.rank(), 2);
      const at::NoGradGuard no_grad;
      const Batch batch = batch_of(model.net->options, step, fabric.rank(), 2);
      model.net(batch.tokens, batch.targets);
    }
    EXPECT_EQ(ended, 3) << "the fourth step goes on";
    EXPECT_EQ(model.timer->steps().back().step, 3);
    EXPECT_EQ(model.timer->now().step, 4);
    EXPECT_EQ(model.timer->now().stage, Stage::between);
  });
}

TEST(StepTimer, TimelinesShowUnitsAndLanesInTheirOrder) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    model.timer->keep(2, 3);
    for (int step = 1; step <= 5; ++step) {
      model.timer->enter(Stage::data);
      model.step(step, fabric.rank(), 2);
      model.timer->end_step(step);
      const auto kept = model.timer->take_kept();
      EXPECT_EQ(kept.has_value(), step == 3);
      if (kept) EXPECT_EQ(kept->size(), 2U);
    }
    model.timer->keep(2, 3);
    EXPECT_EQ(model.timer->take_kept()->size(), 0U) << "heard too late";
    EXPECT_EQ(model.timer->timeline(2)->step, 4);
    EXPECT_EQ(model.timer->timeline(1)->step, 5);
    EXPECT_FALSE(model.timer->timeline(7).has_value());
    const Timeline timeline = *model.timer->timeline(1);
    EXPECT_EQ(model.timer->units().size(), 4U);
    std::set<int> lanes, units;
    double end = 0;
    for (const Span& span : timeline.spans) {
      lanes.insert(span.lane);
      if (span.lane != 0) continue;
      units.insert(span.unit);
      EXPECT_GE(span.begin, end - 1e-5) << "one thing after the other";
      end = span.begin + span.seconds;
    }
    EXPECT_LE(end, timeline.seconds + 1e-5);
    EXPECT_EQ(lanes, (std::set<int>{0, 1, 2}));
    EXPECT_TRUE(units.contains(0) && units.contains(1) && units.contains(3));
  });
}

// It is found out a little later, by a thread that did not run either.
TEST(StepTimer, AStopIsCountedWhereItHappened) {
  StepTimer timer;
  timer.enter(Stage::data);
  os::sleep_for(milliseconds(60));
  timer.enter(Stage::optimizer);
  timer.was_stopped(0.05);
  timer.end_step(1);
  EXPECT_DOUBLE_EQ(timer.steps().back().stopped[static_cast<size_t>(Stage::data)], 0.05);

  timer.enter(Stage::forward);
  os::sleep_for(milliseconds(200));
  for (int64_t step = 2; step < 5; ++step) timer.end_step(step);
  timer.was_stopped(0.2);
  const std::vector<StepTimes> steps = timer.steps();
  EXPECT_DOUBLE_EQ(steps[1].stopped[static_cast<size_t>(Stage::forward)], 0.2);
  EXPECT_EQ(steps[2].stopped, PerStage());

  timer.enter(Stage::backward);
  os::sleep_for(milliseconds(50));
  timer.was_stopped(0.05);
  timer.end_step(5);
  EXPECT_NEAR(timer.steps().back().stopped[static_cast<size_t>(Stage::backward)], 0.05, 1e-9);
}

// What a rank has to do is told by its layers, in forwards; what an evaluation does is no part of a step.
TEST(StepTimer, CountsWhatForwardsHaveToDo) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    Watched model(fabric, 2);
    const auto forward = [&](int step) {
      const Batch batch = batch_of(model.net->options, step, fabric.rank(), 2);
      return model.net(batch.tokens, batch.targets);
    };
    for (int step = 1; step <= 3; ++step) {
      model.timer->enter(Stage::data);
      for (int micro = 0; micro < 2; ++micro) {
        const shard::NoSync no_sync(model.sharded->engine());
        model.timer->next_forward_has(100 * step + fabric.rank());
        const at::Tensor loss = forward(step);
        count_work(Work::pairs, 10 * step);
        loss.backward();
      }
      std::thread([] { count_work(Work::pairs, 1 << 20); }).join();  // nobody's step
      model.step(step, fabric.rank(), 2);
      model.timer->end_step(step);
      const PerWork work = model.timer->work();
      EXPECT_EQ(work[static_cast<size_t>(Work::tokens)], static_cast<uint64_t>(2 * (100 * step + fabric.rank())));
      EXPECT_EQ(work[static_cast<size_t>(Work::expert_tokens)], 0U);
      EXPECT_EQ(work[static_cast<size_t>(Work::pairs)], static_cast<uint64_t>(20 * step));
      const at::NoGradGuard no_grad;
      const auto counts = std::make_shared<CountsInForward>();
      for (const auto& unit : model.sharded->engine().units()) unit->attach(counts);
      forward(step);
      for (const auto& unit : model.sharded->engine().units()) unit->detach(*counts);
    }
  });
}

// Ranks that are threads share a log of links: one of them alone.
TEST(StepTimer, TellsOfTheLinksOfAStepAndTheQuickestOfSome) {
  StepTimer timer;
  timer.enter(Stage::forward);
  const auto send = [](uint64_t bytes, double seconds) {
    comm::LinkLog::of_process().add("tcp", "reduce", "all_reduce", 4, bytes, seconds);
  };
  send(1000, 0.001);
  timer.end_step(1);
  send(1000, 0.1);
  send(2000, 0.1);
  timer.end_step(2);
  ASSERT_EQ(timer.links().size(), 1U);
  const comm::LinkUse use = timer.links()[0];
  EXPECT_EQ(use.calls, 2U);
  EXPECT_EQ(use.bytes, 3000U);
  EXPECT_DOUBLE_EQ(use.seconds, 0.2);
  EXPECT_DOUBLE_EQ(use.quickest, 1e6) << "of the step before";
  timer.end_step(3);
  EXPECT_TRUE(timer.links().empty());
  for (size_t step = 4; step < 4 + StepTimer::speed_steps; ++step) {
    send(1000, 0.1);
    timer.end_step(static_cast<int64_t>(step));
  }
  EXPECT_DOUBLE_EQ(timer.links()[0].quickest, 1e4) << "that was long ago";
}

TEST(StepTimer, KeepsLittle) {
  StepTimer timer;
  for (int64_t step = 1; step <= 2000; ++step) {
    for (int i = 0; i < 10; ++i) timer.enter(Stage::data);
    timer.end_step(step);
  }
  EXPECT_EQ(timer.steps().size(), StepTimer::kept_steps);
  EXPECT_EQ(timer.steps().back().step, 2000);
  EXPECT_EQ(timer.steps(1998).size(), 2U);
}

TEST(StepTimer, AnotherThreadSeesWhetherTheRankWaits) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const auto timer = std::make_shared<StepTimer>();
    timer->enter(Stage::optimizer);
    if (fabric.rank() == 0) {
      Stage seen{};
      {
        const std::jthread looker([&] {
          os::sleep_for(milliseconds(100));
          seen = timer->now().stage;
        });
        fabric.everyone().barrier();
      }
      EXPECT_EQ(seen, Stage::agree);
    } else {
      os::sleep_for(milliseconds(400));
      fabric.everyone().barrier();
    }
  });
}

}  // namespace
}  // namespace tesserae::monitor
