#include "tesserae/monitor/slow_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/monitor/steps_of_a_job.h"

namespace tesserae::monitor {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(SlowRanks, NobodyIsNamedInAThousandQuietSteps) {
  for (const int ranks : {2, 4, 64}) {
    for (const double noise : {0.0, 0.02, 0.1}) {
      Job job(ranks, noise);
      SlowRanks slow;
      for (int step = 0; step < 1000; ++step) {
        const auto changes = slow.add(job.step());
        ASSERT_THAT(changes, IsEmpty()) << ranks << " ranks, noise " << noise << ": " << describe(changes[0].rank);
      }
    }
  }
}

// As with a larger batch: of many ranks somebody is always beyond what was usual of steps before.
TEST(SlowRanks, NobodyIsNamedForLongWhereStepsOfAllBecomeLonger) {
  for (const int ranks : {2, 4, 64}) {
    Job job(ranks, 0.05);
    SlowRanks slow;
    job.disturb = [](int64_t step, auto& all) {
      for (StepTimes& times : all) {
        for (double& seconds : times.seconds) seconds *= step < 200 ? 1 : 4;
      }
    };
    for (int step = 1; step <= 1000; ++step) {
      for (const auto& change : slow.add(job.step())) {
        if (step >= 260) ASSERT_NE(change.turn, Episode::Turn::slow) << step << ": " << describe(change.rank);
      }
    }
    EXPECT_THAT(slow.slow(), IsEmpty()) << ranks;
  }
}

// What others have less than it is not what they usually vary by.
TEST(SlowRanks, WhoIsSlowForLongStaysSlow) {
  for (const int ranks : {2, 4}) {
    Job job(ranks, 0.3);
    SlowRanks slow;
    job.disturb = [](int64_t step, auto& all) {
      for (StepTimes& times : all) Job::at(times, Stage::data) = 0.001;
      if ((step >= 60 && step < 84) || step >= 100) Job::at(all[1], Stage::data) += 0.25;
    };
    std::vector<int64_t> changed;
    for (int step = 1; step <= 300; ++step) {
      for (const auto& change : slow.add(job.step())) changed.push_back(change.step);
    }
    EXPECT_EQ(changed, (std::vector<int64_t>{60, 86, 100})) << ranks;
  }
}

TEST(SlowRanks, ARankThatIsSlowInAStageIsNamedInItsSecondStepAtLatest) {
  for (const Stage stage : {Stage::data, Stage::forward, Stage::backward, Stage::optimizer, Stage::between}) {
    for (const int ranks : {2, 4, 64}) {
      Job job(ranks, 0.03);
      SlowRanks slow;
      const int culprit = ranks - 1;
      job.disturb = [&](int64_t step, auto& all) {
        if (step >= 30 && step < 50) Job::at(all[static_cast<size_t>(culprit)], stage) += 0.1;
      };
      int64_t named = 0, over = 0;
      for (int step = 1; step <= 60; ++step) {
        for (const auto& change : slow.add(job.step())) {
          EXPECT_EQ(change.rank.rank, culprit);
          EXPECT_EQ(change.rank.stage, stage);
          (change.turn == Episode::Turn::slow ? named : over) = change.step;
        }
        if (step == 40) {
          ASSERT_THAT(slow.slow(), SizeIs(1));
          EXPECT_NEAR(slow.slow()[0].seconds, 0.1, 0.05);
          EXPECT_NEAR(slow.slow()[0].share, 0.1 / 0.38, 0.1);
          EXPECT_EQ(slow.slow()[0].since, 30);
        }
      }
      EXPECT_EQ(named, stage == Stage::data ? 30 : 31) << name_of(stage) << " of " << ranks;
      EXPECT_EQ(over, 52) << name_of(stage) << " of " << ranks;
      EXPECT_THAT(slow.slow(), IsEmpty());
    }
  }
}

// What else runs on a machine takes a processor for two steps now and then.
TEST(SlowRanks, ALittleSlownessIsNamedOnceItLasts) {
  Job job(4, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t step, auto& all) {
    if (step == 30 || step == 31 || step >= 50) Job::at(all[1], Stage::backward) += 0.05;
  };
  std::vector<int64_t> named;
  for (int step = 1; step <= 60; ++step) {
    for (const auto& change : slow.add(job.step())) named.push_back(change.step);
  }
  EXPECT_EQ(named, std::vector<int64_t>{53});
}

TEST(SlowRanks, ARankThatIsSlowFromTheBeginningIsNamed) {
  Job job(4, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t, auto& all) { Job::at(all[2], Stage::forward) += 0.06; };
  int64_t named = 0;
  for (int step = 1; step <= 40; ++step) {
    for (const auto& change : slow.add(job.step())) named = change.step;
  }
  EXPECT_GT(named, 0);
  EXPECT_LE(named, 16);
  ASSERT_THAT(slow.slow(), SizeIs(1));
  EXPECT_EQ(slow.slow()[0].rank, 2);
}

// Stopped while it waits: it works no longer than others, and all wait as long.
TEST(SlowRanks, ARankThatWasStoppedIsNamedAtOnceWithTheReason) {
  Job job(4, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t step, auto& all) {
    if (step != 20) return;
    for (StepTimes& times : all) Job::at(times, Stage::reduce) += 0.5;
    all[1].stopped[static_cast<size_t>(Stage::reduce)] = 0.5;
  };
  std::vector<SlowRanks::Change> changes;
  for (int step = 1; step <= 30; ++step) {
    for (const auto& change : slow.add(job.step())) changes.push_back(change);
  }
  ASSERT_THAT(changes, SizeIs(2));
  EXPECT_EQ(changes[0].step, 20);
  EXPECT_EQ(changes[0].rank.rank, 1);
  EXPECT_THAT(describe(changes[0].rank), HasSubstr("rank 1 takes 0.5"));
  EXPECT_THAT(describe(changes[0].rank), HasSubstr("its process did not run for 0.50 s"));
  EXPECT_EQ(changes[1].turn, Episode::Turn::over);
}

// As on a busy machine, where small delays are named already.
TEST(SlowRanks, ARankThatBecomesMuchSlowerIsNamedAgain) {
  Job job(4, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t step, auto& all) {
    if (step >= 20 && step < 30) Job::at(all[1], Stage::data) += step == 25 ? 2 : 0.2;
  };
  std::vector<SlowRanks::Change> changes;
  for (int step = 1; step <= 40; ++step) {
    for (const auto& change : slow.add(job.step())) changes.push_back(change);
  }
  ASSERT_THAT(changes, SizeIs(3));
  EXPECT_EQ(changes[0].turn, Episode::Turn::slow);
  EXPECT_EQ(changes[1].turn, Episode::Turn::slow);
  EXPECT_EQ(changes[1].step, 25);
  EXPECT_NEAR(changes[1].rank.seconds, 2, 0.1);
  EXPECT_EQ(changes[1].rank.since, changes[0].rank.since);
  EXPECT_EQ(changes[2].turn, Episode::Turn::over);
}

TEST(SlowRanks, ARankWithoutAProcessorIsToldApartFromOneThatComputesMore) {
  for (const bool off : {true, false}) {
    Job job(4, 0.03);
    SlowRanks slow;
    job.disturb = [off](int64_t step, auto& all) {
      if (step < 20) return;
      Job::at(all[3], Stage::backward) += 0.2;
      if (off) all[3].off_processor[static_cast<size_t>(Stage::backward)] = 0.2;
    };
    for (int step = 1; step <= 30; ++step) slow.add(job.step());
    ASSERT_THAT(slow.slow(), SizeIs(1));
    EXPECT_EQ(slow.slow()[0].why, off ? "it had no processor for 0.20 s of it" : "");
  }
}

// Stages that vary by 30 % hide what it takes; for how long it had no processor does not vary.
TEST(SlowRanks, ARankWithoutAProcessorIsNamedAtOnceWhereStepsVary) {
  for (const bool off : {true, false}) {
    Job job(2, 0.3);
    SlowRanks slow;
    job.disturb = [off](int64_t step, auto& all) {
      if (step < 40) return;
      Job::at(all[1], Stage::backward) += 0.25;
      if (off) all[1].off_processor[static_cast<size_t>(Stage::backward)] = 0.25;
    };
    std::vector<SlowRanks::Change> changes;
    for (int step = 1; step <= 41; ++step) {
      for (const auto& change : slow.add(job.step())) changes.push_back(change);
    }
    ASSERT_THAT(changes, SizeIs(off ? 1 : 0));
    if (!off) continue;
    EXPECT_EQ(changes[0].rank.rank, 1);
    EXPECT_EQ(changes[0].step, 40);
  }
}

// As above: reading does not vary as much as computing does.
TEST(SlowRanks, ARankWithSlowDataIsNamedAtOnceWhereStepsVary) {
  for (const Stage stage : {Stage::data, Stage::backward}) {
    Job job(2, 0.3);
    SlowRanks slow;
    job.disturb = [stage](int64_t step, auto& all) {
      for (StepTimes& times : all) Job::at(times, Stage::data) = 0.001;
      if (step >= 40) Job::at(all[1], stage) += 0.25;
    };
    std::vector<SlowRanks::Change> changes;
    for (int step = 1; step <= 41; ++step) {
      for (const auto& change : slow.add(job.step())) changes.push_back(change);
    }
    ASSERT_THAT(changes, SizeIs(stage == Stage::data ? 1 : 0));
    if (stage != Stage::data) continue;
    EXPECT_EQ(changes[0].rank.rank, 1);
    EXPECT_EQ(changes[0].rank.stage, Stage::data);
    EXPECT_EQ(changes[0].step, 40);
  }
}

TEST(SlowRanks, NobodyIsNamedWhereProcessorsAreTakenAwayNowAndThen) {
  for (const double share : {0.05, 0.3, 1.0}) {
    Job job(4, 0.1);
    SlowRanks slow;
    std::mt19937 random(3);
    std::uniform_real_distribution<double> uniform;
    job.disturb = [&](int64_t, auto& all) {
      for (StepTimes& times : all) {
        if (uniform(random) >= share) continue;
        const double off = (share < 0.1 ? 0.025 : 0.05) * uniform(random);  // of steps of 0.28 s
        Job::at(times, Stage::backward) += off;
        times.off_processor[static_cast<size_t>(Stage::backward)] = off;
      }
    };
    for (int step = 0; step < 1000; ++step) {
      const auto changes = slow.add(job.step());
      ASSERT_THAT(changes, IsEmpty()) << share << ": " << describe(changes[0].rank);
    }
  }
}

TEST(SlowRanks, ARankWhoseFilesAreNoLongerInMemoryIsToldApart) {
  Job job(2, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t step, auto& all) {
    for (StepTimes& times : all) times.faults = 3;
    if (step < 20) return;
    Job::at(all[1], Stage::forward) += 0.2;
    all[1].off_processor[static_cast<size_t>(Stage::forward)] = 0.2;  // it waits for the disk
    all[1].faults = 2000;
  };
  for (int step = 1; step <= 30; ++step) slow.add(job.step());
  ASSERT_THAT(slow.slow(), SizeIs(1));
  EXPECT_EQ(slow.slow()[0].why, "it waited for 2000 pages from a disk: memory is short, or a mapped file is new");
}

TEST(SlowRanks, TwoSlowRanksAreBothNamedTheMoreExpensiveFirst) {
  Job job(8, 0.03);
  SlowRanks slow;
  job.disturb = [](int64_t step, auto& all) {
    if (step < 20) return;
    Job::at(all[5], Stage::data) += 0.1;
    Job::at(all[1], Stage::forward) += 0.3;
  };
  for (int step = 1; step <= 30; ++step) slow.add(job.step());
  ASSERT_THAT(slow.slow(), SizeIs(2));
  EXPECT_EQ(slow.slow()[0].rank, 1);
  EXPECT_EQ(slow.slow()[1].rank, 5);
}

TEST(SlowRanks, AloneNobodyIsSlow) {
  Job job(1, 0.5);
  SlowRanks slow;
  for (int step = 0; step < 100; ++step) EXPECT_THAT(slow.add(job.step()), IsEmpty());
}

}  // namespace
}  // namespace tesserae::monitor
