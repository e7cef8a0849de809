#include "tesserae/data/mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "tesserae/base/error.h"
#include "tesserae/data/schedule.h"

namespace tesserae::data {
namespace {

using ::testing::HasSubstr;

/// Goes through `samples` of a schedule: every source gets its samples in order, and has its share after each.
/// `rounded`: by how much a weight may differ from what was asked for.
void expect_shares(const std::vector<double>& weights, int64_t samples, double rounded = 1e-12) {
  const Schedule schedule(weights);
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts(weights.size(), 0);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const auto [source, index] = schedule.at(sample);
    ASSERT_EQ(index, counts[source]++) << sample;
    for (size_t i = 0; i < weights.size(); ++i) {
      const double share = weights[i] / sum * static_cast<double>(sample + 1);
      ASSERT_LT(std::abs(static_cast<double>(counts[i]) - share), 1 + rounded * static_cast<double>(sample + 1))
          << "source " << i << ", sample " << sample;
    }
  }
}

TEST(Schedule, EveryBeginningHasTheWeights) {
  expect_shares({0.7, 0.3}, 2'000);
  expect_shares({3, 1}, 100);
  expect_shares({1}, 10);
  expect_shares({1, 1, 1}, 1'000);
  expect_shares({0.9, 0.05, 0.025, 0.025}, 2'000);
  expect_shares({1e-3, 1, 1, 1}, 20'000);
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> weights(2 + random() % 12);
    for (double& weight : weights) weight = static_cast<double>(1 + random() % 40);
    expect_shares(weights, 1'000);
  }
}

TEST(Schedule, WeightsWithoutAShortPeriodAreRoundedToAMillionth) {
  const std::vector<double> weights = {std::sqrt(2.0), std::sqrt(3.0), M_PI};
  EXPECT_EQ(Schedule(weights).period(), 1 << 20);
  expect_shares(weights, 200'000, std::exp2(-20));
}

TEST(Schedule, OfDecimalsThePeriodIsShort) {
  EXPECT_EQ(Schedule({0.7, 0.2, 0.1}).period(), 10);
  EXPECT_EQ(Schedule({2, 2}).period(), 2);
  EXPECT_EQ(Schedule({0.123, 0.877}).period(), 1'000);
}

TEST(Schedule, TurnsArePinned) {
  // A change of these would silently reorder the data of runs that are resumed.
  const Schedule schedule({0.5, 0.3, 0.2});
  std::vector<size_t> sources;
  for (int64_t sample = 0; sample < 10; ++sample) sources.push_back(schedule.at(sample).source);
  EXPECT_EQ(sources, (std::vector<size_t>{0, 1, 0, 2, 0, 1, 0, 1, 0, 2}));
  EXPECT_EQ(schedule.at(10'000'000'003), (Schedule::Turn{2, 2'000'000'000}));
}

TEST(Schedule, WeightsThatCannotBe) {
  EXPECT_THROW(Schedule({}), InvalidArgument);
  EXPECT_THROW(Schedule({1, 0}), InvalidArgument);
  EXPECT_THROW(Schedule({1, -1}), InvalidArgument);
  EXPECT_THROW(Schedule({1, NAN}), InvalidArgument);
  EXPECT_THROW(Schedule({1, INFINITY}), InvalidArgument);
  EXPECT_THROW(Schedule({1, 1e-9}), InvalidArgument);
}

TEST(Mixture, OfOneSourceIsASampler) {
  const Mixture mixture({13}, {2}, 5);
  const Sampler sampler(13, 5);
  for (int64_t i = 0; i < 40; ++i) {
    const Position position = mixture.advance({}, i);
    EXPECT_EQ(position, sampler.advance({}, i));
    EXPECT_EQ(mixture.at(position), (Mixture::Sample{0, sampler.at(position)}));
  }
}

TEST(Mixture, EachSourceGoesThroughItsSamplesInAnOrderOfItsOwn) {
  const Mixture mixture({8, 8, 5}, {0.5, 0.25, 0.25}, 3);
  std::vector<std::vector<int64_t>> seen(3);
  for (int64_t i = 0; i < 4 * 21; ++i) {
    const auto [source, index] = mixture.at(mixture.advance({}, i));
    seen[source].push_back(index);
  }
  const std::vector<int64_t> sizes = {8, 8, 5};
  for (size_t source = 0; source < 3; ++source) {
    const auto size = static_cast<size_t>(sizes[source]);
    for (size_t begin = 0; begin + size <= seen[source].size(); begin += size) {
      const std::set<int64_t> epoch(seen[source].begin() + static_cast<std::ptrdiff_t>(begin),
                                    seen[source].begin() + static_cast<std::ptrdiff_t>(begin + size));
      EXPECT_EQ(epoch.size(), size) << "source " << source << ", from " << begin;
      EXPECT_LT(*epoch.rbegin(), sizes[source]);
    }
  }
  EXPECT_NE(std::vector(seen[0].begin(), seen[0].begin() + 8), std::vector(seen[1].begin(), seen[1].begin() + 8));
  EXPECT_NE(std::vector(seen[0].begin(), seen[0].begin() + 8), std::vector(seen[0].begin() + 8, seen[0].begin() + 16));
}

TEST(Mixture, WhatCannotBeMixed) {
  EXPECT_THROW(Mixture({5, 5}, {1}, 0), InvalidArgument);
  EXPECT_THROW(Mixture({5, 0}, {1, 1}, 0), InvalidArgument);
  EXPECT_THROW(Mixture({}, {}, 0), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::data
