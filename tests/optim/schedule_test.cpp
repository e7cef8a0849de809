#include "tesserae/optim/schedule.h"

#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::optim {
namespace {

TEST(Schedule, WarmsUpLinearly) {
  const Schedule schedule{.peak = 1.0, .warmup_steps = 4, .total_steps = 100};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1.0);
}

TEST(Schedule, CosineFallsToTheMinimum) {
  const Schedule schedule{.peak = 2.0, .warmup_steps = 10, .total_steps = 110, .min_ratio = 0.1};
  EXPECT_DOUBLE_EQ(schedule.at(10), 2.0);
  EXPECT_NEAR(schedule.at(60), 2.0 * 0.55, 1e-12);
  EXPECT_NEAR(schedule.at(110), 0.2, 1e-12);
  EXPECT_NEAR(schedule.at(1'000'000), 0.2, 1e-12);
  for (int64_t step = 10; step < 110; ++step) EXPECT_GT(schedule.at(step), schedule.at(step + 1));
}

TEST(Schedule, LinearAndConstant) {
  const Schedule linear{.peak = 1.0, .total_steps = 10, .min_ratio = 0, .decay = Schedule::Decay::linear};
  EXPECT_DOUBLE_EQ(linear.at(0), 1.0);
  EXPECT_DOUBLE_EQ(linear.at(5), 0.5);
  EXPECT_DOUBLE_EQ(linear.at(10), 0.0);
  const Schedule constant{.peak = 0.5, .warmup_steps = 2, .total_steps = 10, .decay = Schedule::Decay::constant};
  EXPECT_DOUBLE_EQ(constant.at(0), 0.25);
  EXPECT_DOUBLE_EQ(constant.at(9), 0.5);
}

TEST(Schedule, WarmUpLongerThanTheRun) {
  const Schedule schedule{.peak = 1.0, .warmup_steps = 100, .total_steps = 10};
  EXPECT_DOUBLE_EQ(schedule.at(9), 0.1);
}

TEST(Schedule, Names) {
  EXPECT_EQ(decay_from_name("linear"), Schedule::Decay::linear);
  try {
    decay_from_name("cosin");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("\"cosine\""), std::string::npos);
  }
}

}  // namespace
}  // namespace tesserae::optim
