#include "tesserae/shard/schedule.h"

#include <gtest/gtest.h>

namespace tesserae::shard {
namespace {

using Use = Schedule::Use;
const std::vector<Use> step{{0, false}, {1, false}, {2, false}, {0, true}, {2, true}, {1, true}};

void play(Schedule& schedule, const std::vector<Use>& uses) {
  schedule.restart();
  for (const auto& use : uses) schedule.use(use);
  schedule.finish();
}

TEST(Schedule, TheFirstStepRecordsAndExpectsNothing) {
  Schedule schedule;
  schedule.restart();
  std::vector<Use> next;
  for (const auto& use : step) {
    EXPECT_TRUE(schedule.use(use));
    schedule.upcoming(2, next);
    EXPECT_TRUE(next.empty());
    EXPECT_FALSE(schedule.needs_soon(2, 9));
  }
}

TEST(Schedule, ReplaysTheRecord) {
  Schedule schedule;
  play(schedule, step);
  schedule.restart();
  std::vector<Use> next;
  for (size_t i = 0; i < step.size(); ++i) {
    EXPECT_TRUE(schedule.use(step[i]));
    schedule.upcoming(2, next);
    ASSERT_EQ(next.size(), std::min<size_t>(2, step.size() - i - 1));
    for (size_t k = 0; k < next.size(); ++k) EXPECT_EQ(next[k], step[i + 1 + k]);
  }
}

TEST(Schedule, KnowsThatTheLastUnitOfForwardIsNeededAgain) {
  Schedule schedule;
  play(schedule, step);
  schedule.restart();
  for (int i = 0; i < 3; ++i) schedule.use(step[i]);
  EXPECT_TRUE(schedule.needs_soon(2, 2));
  EXPECT_FALSE(schedule.needs_soon(2, 1));
  EXPECT_FALSE(schedule.needs_soon(1, 2));
}

TEST(Schedule, ADepartureIsReportedAndBecomesTheRecord) {
  Schedule schedule;
  play(schedule, step);
  const std::vector<Use> other{{0, false}, {2, false}, {0, true}, {2, true}};
  schedule.restart();
  EXPECT_TRUE(schedule.use(other[0]));
  EXPECT_FALSE(schedule.use(other[1]));  // unit 1 was left out: found further on
  EXPECT_TRUE(schedule.use(other[2]));
  EXPECT_TRUE(schedule.use(other[3]));
  schedule.finish();

  schedule.restart();
  for (const auto& use : other) EXPECT_TRUE(schedule.use(use));
}

TEST(Schedule, AForwardWithoutBackwardLeavesTheRecordAlone) {
  Schedule schedule;
  play(schedule, step);
  schedule.restart();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(schedule.use(step[i]));
  schedule.restart();
  for (const auto& use : step) EXPECT_TRUE(schedule.use(use));
}

TEST(Schedule, PartsThatAreCalledByThemselvesForEverTakeNoMoreMemory) {
  Schedule schedule;
  constexpr int many = 1 << 20;
  for (int i = 0; i < many; ++i) schedule.use({1, false});
  schedule.finish();
  std::vector<Schedule::Use> all;
  schedule.upcoming(many, all);
  EXPECT_LE(all.size(), size_t{1} << 16);
}

}  // namespace
}  // namespace tesserae::shard
