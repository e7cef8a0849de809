#include "tesserae/monitor/slow_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/monitor/slow_ranks.h"
#include "tests/monitor/steps_of_a_job.h"

namespace tesserae::monitor {
namespace {

/// Both kinds of watching, as rank 0 does it.
struct Watch {
  std::optional<SlowLinks::Change> add(const std::vector<StepTimes>& ranks) {
    named += static_cast<int>(slow_ranks.add(ranks).size());
    return links.add(ranks, slow_ranks.suspects());
  }
  SlowRanks slow_ranks;
  SlowLinks links;
  int named = 0;
};

TEST(SlowLinks, NoLinkIsSlowInAThousandQuietSteps) {
  for (const int ranks : {2, 4, 64}) {
    for (const double noise : {0.0, 0.02, 0.1}) {
      Job job(ranks, noise);
      Watch watch;
      for (int step = 0; step < 1000; ++step) {
        const auto change = watch.add(job.step());
        ASSERT_FALSE(change) << ranks << " ranks, noise " << noise << ": " << describe(change->link);
      }
    }
  }
}

TEST(SlowLinks, ALinkThatIsSlowIsToldOfInItsSecondStepAndNoRankIsNamed) {
  for (const Stage stage : {Stage::gather, Stage::reduce}) {
    Job job(4, 0.03);
    Watch watch;
    job.disturb_links = [stage](int64_t step, auto& all) {
      for (StepTimes& times : all) Job::at(times, stage) += step >= 30 && step < 50 ? 0.1 : 0;
    };
    std::vector<std::pair<Episode::Turn, int64_t>> changes;
    for (int step = 1; step <= 60; ++step) {
      if (const auto change = watch.add(job.step())) {
        changes.emplace_back(change->turn, change->step);
        EXPECT_EQ(change->link.stage, stage);
      }
      if (step != 40) continue;
      ASSERT_TRUE(watch.links.slow());
      EXPECT_NEAR(watch.links.slow()->seconds, 0.1, 0.02);
      EXPECT_EQ(watch.links.slow()->since, 30);
      EXPECT_THAT(describe(*watch.links.slow()),
                  ::testing::MatchesRegex("steps take 0\\..* s longer than any rank works, in .*, .* % of a step"));
    }
    EXPECT_THAT(changes,
                ::testing::ElementsAre(std::pair(Episode::Turn::slow, 31), std::pair(Episode::Turn::over, 52)));
    EXPECT_FALSE(watch.links.slow());
    EXPECT_EQ(watch.named, 0);
  }
}

// The others wait, but a rank's work explains it: also where two are slow by turns, so that all wait.
TEST(SlowLinks, SlowRanksAreNoSlowLink) {
  for (const bool by_turns : {false, true}) {
    Job job(4, 0.03);
    Watch watch;
    job.disturb = [by_turns](int64_t step, auto& all) {
      if (step < 30) return;
      Job::at(all[2], Stage::forward) += 0.1;
      if (!by_turns) return;
      Job::at(all[1], Stage::backward) += 0.1;
      for (StepTimes& times : all) Job::at(times, Stage::gather) += 0.1;
      Job::at(all[2], Stage::gather) -= 0.1;
    };
    for (int step = 1; step <= 60; ++step) EXPECT_FALSE(watch.add(job.step())) << step;
    EXPECT_GT(watch.named, 0);
  }
}

// Rank 1 lost it at the end of its step, when rank 0 had begun the next one.
TEST(SlowLinks, WhatOthersWaitForInTheNextStepIsNoSlowLink) {
  Job job(2, 0.03);
  Watch watch;
  job.disturb = [](int64_t step, auto& all) {
    if (step == 30) Job::at(all[1], Stage::optimizer) += 0.5;
  };
  job.disturb_links = [](int64_t step, auto& all) {
    if (step == 31) Job::at(all[0], Stage::agree) += 0.5;
  };
  for (int step = 1; step <= 40; ++step) EXPECT_FALSE(watch.add(job.step())) << step;
  EXPECT_EQ(watch.named, 2) << "slow, and over";
}

TEST(SlowLinks, OtherDegreesHaveOtherTraffic) {
  Job job(4, 0.03);
  Watch watch;
  job.disturb_links = [](int64_t step, auto& all) {
    for (StepTimes& times : all) {
      times.degrees = step < 30 ? mesh::Degrees{1, 1, 4} : mesh::Degrees{4, 4, 4};
      Job::at(times, Stage::gather) += step < 30 ? 0 : 0.2;
      Job::at(times, Stage::reduce) += step < 50 ? 0 : 0.2;
    }
  };
  std::vector<int64_t> told;
  for (int step = 1; step <= 60; ++step) {
    if (watch.add(job.step())) told.push_back(step);
  }
  EXPECT_THAT(told, ::testing::ElementsAre(51));
}

TEST(SlowLinks, WhatStaysIsUsualInTheEnd) {
  Job job(2, 0.03);
  Watch watch;
  job.disturb_links = [](int64_t step, auto& all) {
    for (StepTimes& times : all) Job::at(times, Stage::reduce) += step < 30 ? 0 : 0.1;
  };
  std::vector<Episode::Turn> turns;
  for (int step = 1; step <= 200; ++step) {
    if (const auto change = watch.add(job.step())) turns.push_back(change->turn);
  }
  EXPECT_THAT(turns, ::testing::ElementsAre(Episode::Turn::slow, Episode::Turn::over));
}

}  // namespace
}  // namespace tesserae::monitor
