#include "tesserae/dial/look.h"

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
  Trial(const Degrees& in_use, const Truth& truth) : look(in_use, std::vector<double>(5, truth(in_use))) {
    const auto stay = [&](const Degrees& degrees) {
      ++visits[key(degrees)];
      for (int i = 0; i < steps_of_a_visit; ++i) look.add(degrees, truth(degrees));
    };
    for (const Degrees& degrees : mesh::all_degrees(4)) {
      if (degrees == in_use) continue;
      look.visit(degrees);
      last = degrees;
      stay(degrees);
    }
    while (const auto to = look.again()) {
      EXPECT_NE(*to, last) << "a visit of where it is changes nothing";
      last = *to;
      stay(*to);
      ++again;
    }
  }

  Look look;
  std::map<std::tuple<int, int, int>, int> visits;
  Degrees last;
  int again = 0;
};

double truth_without_noise(const Degrees& degrees) {
  return 1 + 0.1 * (degrees.parameters + 2 * degrees.gradients) - 0.02 * degrees.optimizer;
}

TEST(Look, FindsTheFastestAndVisitsTheSlowOnce) {
  Trial trial({4, 4, 4}, truth_without_noise);
  EXPECT_EQ(trial.look.best(), (Degrees{1, 1, 4}));
  EXPECT_EQ(trial.visits[key({1, 1, 4})], 3);  // of ten, five, two
  EXPECT_EQ(trial.visits[key({2, 4, 4})], 1);
  EXPECT_EQ(trial.again, 5 + 2);
  EXPECT_EQ(trial.look.measured().size(), 10u);
  EXPECT_DOUBLE_EQ(trial.look.seconds({1, 1, 4}), truth_without_noise({1, 1, 4}));
  EXPECT_EQ(trial.look.noise({1, 1, 4}), 0);
}

TEST(Look, KeepsWhatIsInUseIfItIsTheFastest) {
  EXPECT_EQ(Trial({1, 1, 4}, truth_without_noise).look.best(), (Degrees{1, 1, 4}));
}

TEST(Look, ComesNearTheBestOfNoisySteps) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  int near = 0;
  constexpr int runs = 200;
  for (int run = 0; run < runs; ++run) {
    const Trial trial({4, 4, 4},
                      [&](const Degrees& d) { return truth_without_noise(d) * (1 + 0.08 * normal(random)); });
    near += truth_without_noise(trial.look.best()) <= 1.05 * truth_without_noise({1, 1, 4}) ? 1 : 0;
  }
  EXPECT_GE(near, 0.9 * runs) << "with a noise of 8 % of a step, where layouts differ by 2 to 60 %";
}

TEST(Look, OneSlowStepDoesNotCount) {
  Look look({2, 2, 2}, {1.0, 1.0, 1.0});
  look.visit({1, 1, 1});
  for (const double seconds : {0.9, 9.0, 0.9}) look.add({1, 1, 1}, seconds);
  EXPECT_EQ(look.best(), (Degrees{1, 1, 1}));
  EXPECT_FALSE(look.again());
}

TEST(Look, WhatWasNeverMeasuredIsNotChosen) {
  Look look({2, 2, 2}, {1.0, 1.1, 1.0});
  look.visit({1, 1, 1});
  look.add({4, 4, 4}, 0.1);  // nobody visits it
  EXPECT_EQ(look.best(), (Degrees{2, 2, 2}));
  EXPECT_FALSE(look.again());
  EXPECT_EQ(look.measured(), (std::vector<Degrees>{{2, 2, 2}}));
  EXPECT_THROW(look.seconds({1, 1, 1}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::dial
