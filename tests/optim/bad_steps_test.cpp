#include "tesserae/optim/bad_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>

namespace tesserae::optim {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

BadSteps judge(std::optional<double> spike = {}) {
  return BadSteps(spike);
}

TEST(BadSteps, NumbersThatAreNotFinite) {
  const BadSteps steps = judge();
  EXPECT_THAT(steps.verdict(2, 1, false), IsEmpty());
  EXPECT_THAT(steps.verdict(nan, 1, false), HasSubstr("loss"));
  EXPECT_THAT(steps.verdict(-infinity, 1, true), HasSubstr("loss"));
  EXPECT_THAT(steps.verdict(2, nan, false), HasSubstr("gradients"));
  EXPECT_THAT(steps.verdict(2, infinity, /*overflow_expected=*/true), IsEmpty());
  EXPECT_THAT(steps.verdict(1e30, 1e30, false), IsEmpty()) << "nobody asked about spikes";
}

TEST(BadSteps, ASpikeIsAJudgementOfEarlierSteps) {
  BadSteps steps = judge(1.5);
  for (int i = 0; i < 7; ++i) steps.add(2 + 0.1 * (i % 2), false);
  EXPECT_THAT(steps.verdict(100, 1, false), IsEmpty()) << "seven steps are too few";
  steps.add(2, false);
  EXPECT_THAT(steps.verdict(2.9, 1, false), IsEmpty());
  EXPECT_THAT(steps.verdict(3.2, 1, false), HasSubstr("1.5 times 2"));
  // Bad ones do not become usual; of the good ones the last 32 count.
  for (int i = 0; i < 40; ++i) steps.add(50, true);
  EXPECT_THAT(steps.verdict(50, 1, false), HasSubstr("more than"));
  for (int i = 0; i < 40; ++i) steps.add(1, false);
  EXPECT_THAT(steps.verdict(1.6, 1, false), HasSubstr("1.5 times 1"));
}

TEST(BadSteps, LossesMayBeNegative) {
  BadSteps steps = judge(3);
  for (int i = 0; i < 10; ++i) {
    EXPECT_THAT(steps.verdict(-1 - 0.01 * i, 1, false), IsEmpty()) << "it falls";
    steps.add(-1 - 0.01 * i, false);
  }
  EXPECT_THAT(steps.verdict(1, 1, false), IsEmpty());
  EXPECT_THAT(steps.verdict(1.1, 1, false),
              HasSubstr("further above -1.045, the median of 10 steps before, than 2 times"));
}

TEST(BadSteps, ContinueWhereTheyWere) {
  BadSteps steps = judge(2), continued = judge(2);
  for (int i = 0; i < 9; ++i) steps.add(1 + i, false);
  steps.went_back(4);
  steps.add(99, true);
  continued.take_over(nlohmann::json::parse(steps.description().dump()));
  EXPECT_EQ(continued.in_a_row(), 1);
  EXPECT_EQ(continued.rollbacks(), 4);
  EXPECT_EQ(continued.verdict(11, 1, false), steps.verdict(11, 1, false));
  EXPECT_THAT(continued.verdict(11, 1, false), HasSubstr("more than 2 times 5"));
  continued.add(3, false);
  EXPECT_EQ(continued.in_a_row(), 0);
  EXPECT_THROW(continued.take_over({{"losses", "none"}}), nlohmann::json::exception);
}

}  // namespace
}  // namespace tesserae::optim
