#include "tesserae/dial/belief.h"

#include <gtest/gtest.h>

#include <random>

// Layouts in numbers: what the plan says of each, and what its steps take.

namespace tesserae::dial {
namespace {

constexpr int steps_of_a_visit = 3;

/// Four layouts whose gathers and reductions take so long, of a step that computes for a second.
const std::vector<std::vector<double>> planned = {{0.4, 0.2}, {0.2, 0.2}, {0.1, 0.4}, {0.0, 0.6}};

TEST(Belief, BeginsWithThePrediction) {
  Belief belief(planned);
  belief.saw(0, {1.48, 1.48, 1.48});
  EXPECT_NEAR(belief.seconds(0), 1.48, 1e-3);
  for (size_t i = 1; i < planned.size(); ++i) {
    EXPECT_NEAR(belief.seconds(i), belief.predicted(i), 0.01) << "layout " << i;
    EXPECT_GT(belief.error(i, 0), 0.02) << "nobody has seen it";
    EXPECT_FALSE(belief.visited(i));
  }
  EXPECT_NEAR(belief.predicted(1), 1.48 - 0.8 * 0.2, 1e-9);
  EXPECT_TRUE(belief.visited(0));
  EXPECT_DOUBLE_EQ(belief.measured(0), 1.48);
}

TEST(Belief, AVisitTellsOfTheOthers) {
  // Gathers are hidden, reductions are not: one visit of a layout with fewer gathers shows it.
  Belief belief(planned);
  belief.saw(0, {1.2, 1.2, 1.2});
  const double before = belief.error(2, 0);
  belief.saw(1, {1.2, 1.2, 1.2});
  belief.saw(3, {1.6, 1.6, 1.6});
  EXPECT_NEAR(belief.seconds(2), 1.4, 0.03);
  EXPECT_LT(belief.error(2, 0), before);
  EXPECT_LE(belief.surprise(), 2);
}

TEST(Belief, AWrongPredictionShowsAndWidensWhatMayBe) {
  const std::vector<std::vector<double>> alike(4, {0.001, 0.001});
  Belief belief(alike);
  belief.saw(0, {1.0, 1.01, 0.99});
  EXPECT_EQ(belief.surprise(), 1);
  const double before = belief.error(2, 0);
  belief.saw(1, {1.5, 1.51, 1.49});
  EXPECT_GE(belief.surprise(), 4);
  EXPECT_GE(belief.error(2, 0), 2 * before);
  EXPECT_NEAR(belief.seconds(1), 1.5, 0.02) << "what was measured is stronger";
}

TEST(Belief, ExpectsToGainWhereTheBestIsNotYetKnown) {
  Belief belief(planned);
  belief.saw(0, {1.48, 1.49, 1.47});
  EXPECT_GT(belief.expected_gain(1, 1, 0, steps_of_a_visit), 0.02) << "it may well be faster";
  belief.saw(1, {1.32, 1.33, 1.31});
  EXPECT_LT(belief.expected_gain(0, 0, 1, steps_of_a_visit), 0.001) << "clearly slower";
  EXPECT_GT(belief.expected_gain(2, 2, 1, steps_of_a_visit), 0.001) << "not seen yet";
}

TEST(Belief, ExpectsNothingOfAnotherVisitThatNoiseDrowns) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal(1, 0.5);
  const auto steps = [&] {
    std::vector<double> values;
    for (int i = 0; i < 5; ++i) values.push_back(std::max(0.2, normal(random)));
    return values;
  };
  Belief belief(std::vector<std::vector<double>>(4, {0.001, 0.001}));
  belief.saw(0, steps());
  belief.saw(1, steps());
  EXPECT_GT(belief.noise(), 0.2);
  const size_t best = belief.seconds(0) <= belief.seconds(1) ? 0 : 1;
  EXPECT_LT(belief.expected_gain(1 - best, 1 - best, best, steps_of_a_visit), 0.005 * belief.seconds(best));
  EXPECT_GT(belief.expected_gain(2, 2, best, steps_of_a_visit), 0.01 * belief.seconds(best)) << "nobody has looked";
}

TEST(Belief, VisitsOfALayoutCountTogether) {
  Belief belief(planned);
  belief.saw(0, {1.48, 1.49, 1.47});
  belief.saw(1, {1.40, 1.41, 1.39});
  const double once = belief.error(1, 0);
  belief.saw(1, {1.30, 1.31, 1.29});
  EXPECT_LT(belief.error(1, 0), once);
  EXPECT_NEAR(belief.seconds(1), 1.35, 0.02);
  EXPECT_DOUBLE_EQ(belief.measured(1), 1.35) << "the median of all six";
}

TEST(Belief, IsOfAMachineThatBecameSlower) {
  Belief belief(planned);
  belief.saw(0, {1.0, 1.01, 0.99});
  belief.saw(1, {0.9, 0.91, 0.89});
  belief.rescale(2);
  EXPECT_DOUBLE_EQ(belief.measured(0), 2.0);
  EXPECT_NEAR(belief.seconds(1), 1.8, 0.04);
}

TEST(Belief, TheSpreadOfSteps) {
  EXPECT_EQ(relative_spread({1, 1, 1, 5}), 0) << "one slow step does not count";
  EXPECT_NEAR(relative_spread({0.9, 1.0, 1.1}), 0.148, 1e-9);
}

}  // namespace
}  // namespace tesserae::dial
