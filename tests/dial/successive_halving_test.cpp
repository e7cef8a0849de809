#include "tesserae/dial/successive_halving.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "tesserae/base/error.h"

namespace tesserae::dial {
namespace {

using mesh::Degrees;

constexpr int steps_of_a_visit = 4;

std::tuple<int, int, int> key(const Degrees& degrees) {
  return {degrees.parameters, degrees.gradients, degrees.optimizer};
}

/// Visits all layouts of four ranks and follows the rounds to their end; `truth`: seconds of a step.
struct Trial {
  template <class Truth>
  Trial(const Degrees& in_use, const Truth& truth) : halving(in_use, std::vector<double>(5, truth(in_use))) {
    const auto stay = [&](const Degrees& degrees) {
      ++visits[key(degrees)];
      for (int i = 0; i < steps_of_a_visit; ++i) halving.add(degrees, truth(degrees));
    };
    for (const Degrees& degrees : mesh::all_degrees(4)) {
      if (degrees == in_use) continue;
      halving.visit(degrees);
      last = degrees;
      stay(degrees);
    }
    while (const auto to = halving.again()) {
      EXPECT_NE(*to, last) << "a visit of where it is changes nothing";
      last = *to;
      stay(*to);
      ++again;
    }
  }

  SuccessiveHalving halving;
  std::map<std::tuple<int, int, int>, int> visits;
  Degrees last;
  int again = 0;
};

double truth_without_noise(const Degrees& degrees) {
  return 1 + 0.1 * (degrees.parameters + 2 * degrees.gradients) - 0.02 * degrees.optimizer;
}

TEST(SuccessiveHalving, FindsTheFastestAndVisitsTheSlowOnce) {
  Trial trial({4, 4, 4}, truth_without_noise);
  EXPECT_EQ(trial.halving.best(), (Degrees{1, 1, 4}));
  EXPECT_EQ(trial.visits[key({1, 1, 4})], 3);  // of ten, five, two
  EXPECT_EQ(trial.visits[key({2, 4, 4})], 1);
  EXPECT_EQ(trial.again, 5 + 2);
  EXPECT_EQ(trial.halving.measured().size(), 10u);
  EXPECT_DOUBLE_EQ(trial.halving.seconds({1, 1, 4}), truth_without_noise({1, 1, 4}));
  EXPECT_EQ(trial.halving.noise({1, 1, 4}), 0);
}

TEST(SuccessiveHalving, KeepsWhatIsInUseIfItIsTheFastest) {
  EXPECT_EQ(Trial({1, 1, 4}, truth_without_noise).halving.best(), (Degrees{1, 1, 4}));
}

TEST(SuccessiveHalving, ComesNearTheBestOfNoisySteps) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  int near = 0;
  constexpr int runs = 200;
  for (int run = 0; run < runs; ++run) {
    const Trial trial({4, 4, 4},
                      [&](const Degrees& d) { return truth_without_noise(d) * (1 + 0.08 * normal(random)); });
    near += truth_without_noise(trial.halving.best()) <= 1.05 * truth_without_noise({1, 1, 4}) ? 1 : 0;
  }
  EXPECT_GE(near, 0.9 * runs) << "with a noise of 8 % of a step, where layouts differ by 2 to 60 %";
}

TEST(SuccessiveHalving, OneSlowStepDoesNotCount) {
  SuccessiveHalving halving({2, 2, 2}, {1.0, 1.0, 1.0});
  halving.visit({1, 1, 1});
  for (const double seconds : {0.9, 9.0, 0.9}) halving.add({1, 1, 1}, seconds);
  EXPECT_EQ(halving.best(), (Degrees{1, 1, 1}));
  EXPECT_FALSE(halving.again());
}

TEST(SuccessiveHalving, WhatWasNeverMeasuredIsNotChosen) {
  SuccessiveHalving halving({2, 2, 2}, {1.0, 1.1, 1.0});
  halving.visit({1, 1, 1});
  halving.add({4, 4, 4}, 0.1);  // nobody visits it
  EXPECT_EQ(halving.best(), (Degrees{2, 2, 2}));
  EXPECT_FALSE(halving.again());
  EXPECT_EQ(halving.measured(), (std::vector<Degrees>{{2, 2, 2}}));
  EXPECT_THROW(halving.seconds({1, 1, 1}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::dial
