#include "tesserae/dial/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <tuple>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/cost/estimate.h"
#include "tesserae/cost/memory.h"
#include "tesserae/dial/record.h"
#include "tests/os/scratch.h"

// A cluster in numbers: what a step takes and what is free with given degrees. The tuner is told, and followed one step
// late, as in a job.

namespace tesserae::dial {
namespace {

using mesh::Degrees;
using ::testing::HasSubstr;

struct Cluster {
  cost::Facts facts;
  cost::Links links;       // what the tuner believes
  cost::Links truth;       // what is
  double compute = 0.1;    // seconds
  double exposed = 1;      // share of communication that is not hidden
  double noise = 0;        // relative, of each step
  double place = 0;        // bytes; 0: no memory is looked at
  double activations = 0;  // bytes
  double change_seconds = 0.02;

  double seconds(const Degrees& degrees) const {
    return compute + exposed * cost::moving_seconds(facts, truth, degrees);
  }
  double free(const Degrees& degrees) const { return place - activations - cost::memory_of(facts, degrees); }
  /// By trying all.
  Degrees best() const {
    std::optional<Degrees> best;
    for (const Degrees& degrees : mesh::all_degrees(facts.ranks())) {
      if (place > 0 && free(degrees) < 0.1 * place) continue;
      if (!best || seconds(degrees) < seconds(*best)) best = degrees;
    }
    return best.value_or(Degrees{});
  }
};

/// 350M parameters in bf16 on `hosts` of 4 GPUs.
Cluster gpus(int hosts, double between) {
  Cluster cluster;
  for (int rank = 0; rank < 4 * hosts; ++rank) cluster.facts.host_of.push_back(rank / 4);
  cluster.facts.ranks_share_place = false;
  cluster.facts.parameters = 350'000'000;
  cluster.facts.root_unit = 50'000'000;
  cluster.facts.largest_unit = 12'500'000;
  cluster.facts.units = 25;
  cluster.facts.compute_bytes = 2;
  cluster.links = {
      .inside = 100e9, .between = between, .inside_latency = 2e-5, .between_latency = 5e-5, .memory = 1e12};
  cluster.truth = cluster.links;
  return cluster;
}

class Job {
 public:
  Job(Cluster cluster, Degrees begin, TunerOptions options = {})
      : cluster(std::move(cluster)), tuner(this->cluster.facts, this->cluster.links, options), now(begin) {}

  void steps(int64_t count) {
    for (int64_t i = 0; i < count; ++i) one();
  }

  void one() {
    ++step;
    ++at[key(now)];
    const double factor = 1 + cluster.noise * normal_(random_);
    const Observation seen{.step = step,
                           .degrees = now,
                           .seconds = cluster.seconds(now) * std::max(0.5, factor) * (fresh_ ? 1.5 : 1.0),
                           .change_seconds = fresh_ ? cluster.change_seconds : 0,
                           .place = cluster.place,
                           .free = cluster.place > 0 ? std::max(0.0, cluster.free(now)) : 0};
    least_free = std::min(least_free, cluster.free(now));
    const std::optional<Decision> late = std::exchange(decided_, tuner.observe(seen));
    told.push_back({seen, decided_});
    if (decided_) said.push_back(decided_->why);
    fresh_ = false;
    if (late && late->degrees != now && refuses && refuses(late->degrees)) {
      ++refused[key(late->degrees)];
    } else if (late && late->degrees != now) {
      now = late->degrees;
      ++changes;
      fresh_ = true;
    }
    EXPECT_LE(tuner.steps_spent(), tuner.steps_allowed() + 1) << "step " << step;
  }

  Cluster cluster;
  Tuner tuner;
  Degrees now;
  int64_t step = 0;
  int changes = 0;
  double least_free = 1e18;
  std::vector<Recorded> told;
  std::vector<std::string> said;
  using Key = std::tuple<int, int, int>;
  static Key key(const Degrees& degrees) { return {degrees.parameters, degrees.gradients, degrees.optimizer}; }
  std::map<Key, int64_t> at;
  std::function<bool(const Degrees&)> refuses;  // what cannot be had
  std::map<Key, int> refused;                   // how often it was asked for

 private:
  std::optional<Decision> decided_;
  bool fresh_ = true;
  std::mt19937_64 random_{7};
  std::normal_distribution<double> normal_;
};

TEST(Tuner, FindsTheHybridOnFastHostsWithASlowLink) {
  Job run(gpus(4, 1e9), {16, 16, 16});
  run.steps(400);
  EXPECT_LE(run.cluster.seconds(run.now), 1.03 * run.cluster.seconds(run.cluster.best()))
      << to_string(run.now) << " instead of " << to_string(run.cluster.best());
  EXPECT_LE(run.now.parameters, 4) << "gathers stay inside hosts";
}

TEST(Tuner, StaysWhereItIsIfNothingIsBetter) {
  Cluster cluster = gpus(1, 1e9);
  const Degrees best = cluster.best();
  Job run(cluster, best);
  run.steps(2000);
  EXPECT_EQ(run.now, best);
}

TEST(Tuner, MeasurementIsStrongerThanAWrongEstimate) {
  Cluster cluster = gpus(4, 1e9);
  cluster.links.between = 400e9;  // it believes that the link is fast
  Job run(cluster, {8, 8, 8});
  run.steps(1500);
  EXPECT_LT(run.cluster.seconds(run.now), 0.8 * run.cluster.seconds({8, 8, 8})) << to_string(run.now);
}

TEST(Tuner, APredictionThatIsRightIsConfirmedInFewVisits) {
  for (const int hosts : {1, 2, 4}) {
    Cluster cluster = gpus(hosts, 2e9);
    cluster.exposed = 0.7;  // by how much it comes true, nobody knows before
    cluster.noise = 0.02;
    TunerOptions options;
    options.planned_steps = 10'000;
    Job run(cluster, {4, 4, 4}, options);
    run.steps(42);
    const Degrees settled = run.now;
    EXPECT_LE(run.cluster.seconds(settled), 1.03 * run.cluster.seconds(run.cluster.best()))
        << to_string(settled) << " instead of " << to_string(run.cluster.best());
    EXPECT_LE(run.at.size(), 7u) << "of " << mesh::all_degrees(4 * hosts).size() << " layouts";
    EXPECT_FALSE(run.at.contains({1, 1, 1})) << "replicas are predicted to be clearly worse";
    run.steps(200);
    EXPECT_EQ(run.now, settled);
    EXPECT_THAT(run.said.back(), HasSubstr("measured (predicted): ")) << "one beside the other";
    EXPECT_THAT(run.said.back(), HasSubstr(" not tried, the best of them, "));
  }
}

TEST(Tuner, NeverTriesWhatDoesNotFit) {
  Cluster cluster = gpus(1, 1e9);
  cluster.activations = 2e9;
  cluster.place =
      cluster.activations + 1.3 * cost::memory_of(cluster.facts, {2, 2, 2});  // replicas need almost twice that
  Job run(cluster, {4, 4, 4});
  run.steps(1500);
  EXPECT_GE(run.least_free, 0.1 * cluster.place) << "at every step";
  EXPECT_FALSE(run.at.contains({1, 1, 1}));
}

TEST(Tuner, RaisesTheDegreeAtOnceWhenMemoryGetsScarce) {
  Cluster cluster = gpus(1, 1e9);
  cluster.place = 40e9;
  cluster.activations = 10e9;
  Job run(cluster, {1, 1, 1});
  run.steps(300);
  const Degrees before = run.now;
  const double needed = cost::memory_of(cluster.facts, before);
  // Longer sequences: less than the headroom is left, but the job still lives, and full sharding would fit.
  run.cluster.activations = 40e9 - cost::memory_of(cluster.facts, {4, 4, 4}) - 0.105 * 40e9;
  ASSERT_LT(run.cluster.free(before), 0.1 * 40e9);
  ASSERT_GT(run.cluster.free(before), 0);
  run.steps(3);
  EXPECT_LT(cost::memory_of(cluster.facts, run.now), needed) << "three steps later it is done";
  EXPECT_GE(run.cluster.free(run.now), 0.1 * 40e9);
  EXPECT_THAT(run.said.back(), HasSubstr(" % free in step 301, and 10 % are to stay free"));
  const int changes = run.changes;
  run.steps(3000);
  EXPECT_GE(run.cluster.free(run.now), 0.1 * 40e9);
  EXPECT_LE(run.changes - changes, 30) << "and it does not flap";
  // It is over: with twice the headroom to spare, the faster layout comes back.
  run.cluster.activations = 10e9;
  run.steps(3000);
  EXPECT_LE(run.cluster.seconds(run.now), 1.03 * run.cluster.seconds(before));
}

TEST(Tuner, TakesTheSmallestIfNothingFits) {
  Cluster cluster = gpus(1, 1e9);
  cluster.place = 10e9;
  cluster.activations = 10e9 - 1.02 * cost::memory_of(cluster.facts, {1, 1, 1});
  TunerOptions options;
  options.headroom = 0.6;
  Job run(cluster, {1, 1, 1}, options);
  run.steps(20);
  EXPECT_EQ(run.now, (Degrees{4, 4, 4}));
  run.steps(1000);
  EXPECT_EQ(run.now, (Degrees{4, 4, 4}));
  EXPECT_EQ(run.changes, 1);
}

TEST(Tuner, NoiseDoesNotMakeItFlap) {
  for (const double noise : {0.02, 0.1, 0.3}) {
    Cluster cluster = gpus(4, 1e9);
    cluster.noise = noise;
    Job run(cluster, {4, 4, 4});
    run.steps(600);
    const int changes = run.changes;
    run.steps(4400);
    EXPECT_LE(run.changes - changes, 4400 * 0.02 / 3) << "noise " << noise;
    EXPECT_LE(run.tuner.steps_spent(), 100 + 1) << "2 % of 5,000";
    int64_t most = 0;
    for (const auto& [degrees, count] : run.at) most = std::max(most, count);
    EXPECT_GE(most, (noise < 0.3 ? 0.9 : 0.6) * 5000) << "noise " << noise;
  }
}

TEST(Tuner, LooksAgainWhenConditionsDrift) {
  Job run(gpus(4, 25e9), {4, 4, 4});
  run.steps(1500);
  const Degrees before = run.now;
  run.cluster.truth.between = 0.3e9;  // somebody else uses the link
  run.steps(1500);
  EXPECT_LE(run.cluster.seconds(run.now), 1.05 * run.cluster.seconds(run.cluster.best()))
      << to_string(before) << " then " << to_string(run.now) << " instead of " << to_string(run.cluster.best());
}

TEST(Tuner, SpendsAtMostTwoPercentWhateverHappens) {
  Cluster cluster = gpus(4, 1e9);
  cluster.change_seconds = 1;  // expensive: ten steps
  Job run(cluster, {16, 16, 16});
  std::mt19937_64 random(3);
  for (int i = 0; i < 100; ++i) {  // conditions that never rest
    run.cluster.compute = 0.05 + 0.002 * static_cast<double>(random() % 100);
    run.steps(100);
  }
  int64_t away = 0, most = 0;
  for (const auto& [degrees, count] : run.at) most = std::max(most, count);
  away = run.step - most;
  EXPECT_LE(run.tuner.steps_spent(), 0.02 * 10'000 + 1);
  EXPECT_LE(away, 600) << "what won for a while is not spent, but it is bounded";
}

TEST(Tuner, SpendsTheShareOfPlannedStepsInAdvance) {
  Cluster cluster = gpus(4, 1e9);
  cluster.noise = 0.05;
  TunerOptions options;
  options.planned_steps = 10'000;
  Job run(cluster, {16, 16, 16}, options);
  run.steps(150);
  EXPECT_GT(run.tuner.steps_spent(), 5);
  EXPECT_LE(run.tuner.steps_spent(), 0.6 * 0.02 * 10'000) << "the rest waits for conditions to change";
  EXPECT_LE(run.cluster.seconds(run.now), 1.05 * run.cluster.seconds(run.cluster.best()))
      << to_string(run.now) << " instead of " << to_string(run.cluster.best());
  run.steps(9'850);
  EXPECT_LE(run.tuner.steps_spent(), 0.02 * 10'000 + 1);
}

TEST(Tuner, MostlyFindsTheBestOfFourRanksWhateverItBelieves) {
  // Layouts that differ by a few percent, steps that vary by as much, and an estimate that knows nothing.
  std::mt19937_64 random(11);
  int near = 0;
  constexpr int jobs = 50;
  for (int i = 0; i < jobs; ++i) {
    Cluster cluster = gpus(1, 1e9);
    cluster.noise = 0.05;
    cluster.truth.inside = 1e9 * static_cast<double>(1 + random() % 50);
    cluster.truth.memory = 1e10 * static_cast<double>(1 + random() % 50);
    cluster.links.inside = cluster.links.memory = 1e14;  // all layouts look alike
    TunerOptions options;
    options.planned_steps = 10'000;
    Job run(cluster, {4, 4, 4}, options);
    run.steps(130);
    near += run.cluster.seconds(run.now) <= 1.05 * run.cluster.seconds(run.cluster.best()) ? 1 : 0;
  }
  EXPECT_GE(near, 0.7 * jobs);
}

/// Another tuner that hears the same decides the same.
void expect_same_again(const Job& run) {
  Tuner again(run.cluster.facts, run.cluster.links);
  for (const Recorded& one : run.told) {
    const std::optional<Decision> decision = again.observe(one.seen);
    ASSERT_EQ(decision.has_value(), one.decision.has_value()) << "step " << one.seen.step;
    if (!decision) continue;
    EXPECT_EQ(decision->degrees, one.decision->degrees) << "step " << one.seen.step;
  }
}

TEST(Tuner, DoesNotTryAgainWhatWasRefused) {
  Job run(gpus(4, 1e9), {16, 16, 16});
  const Degrees best = run.cluster.best();
  run.refuses = [&](const Degrees& degrees) { return degrees == best; };
  run.steps(1500);
  EXPECT_EQ(run.refused, (std::map<Job::Key, int>{{Job::key(best), 1}}));
  double second = 1e9;
  for (const Degrees& degrees : mesh::all_degrees(16)) {
    if (degrees != best) second = std::min(second, run.cluster.seconds(degrees));
  }
  EXPECT_LE(run.cluster.seconds(run.now), 1.05 * second) << to_string(run.now);
  // When conditions drift, it may be had.
  run.refuses = {};
  run.cluster.truth.between = 0.3e9;
  ASSERT_EQ(run.cluster.best(), best);
  run.steps(1500);
  EXPECT_EQ(run.now, best);
  expect_same_again(run);
}

TEST(Tuner, LivesWithWhatThereIsIfAllIsRefused) {
  Job run(gpus(1, 1e9), {2, 2, 2});
  run.refuses = [](const Degrees& /*degrees*/) { return true; };
  run.steps(2000);
  EXPECT_EQ(run.changes, 0);
  EXPECT_FALSE(run.refused.empty());
  for (const auto& [degrees, times] : run.refused) EXPECT_EQ(times, 1);
  EXPECT_THAT(run.tuner.state(), HasSubstr("holding P=2 G=2 O=2"));
  expect_same_again(run);
}

/// Replicas, for which memory got scarce.
Job scarce() {
  Cluster cluster = gpus(1, 1e9);
  cluster.place = 40e9;
  cluster.activations = 40e9 - cost::memory_of(cluster.facts, {2, 2, 2}) - 0.105 * 40e9;
  return {cluster, {1, 1, 1}};
}

TEST(Tuner, TakesTheNextBestWhenWhatWouldRelieveIsRefused) {
  Job run = scarce();
  std::optional<Degrees> first;
  run.refuses = [&](const Degrees& degrees) {
    if (!first) first = degrees;
    return degrees == *first;
  };
  run.steps(10);
  EXPECT_GE(run.cluster.free(run.now), 0.1 * 40e9) << to_string(run.now);
  EXPECT_EQ(run.changes, 1);
  run.steps(1000);
  EXPECT_EQ(run.refused, (std::map<Job::Key, int>{{Job::key(*first), 1}}));
  expect_same_again(run);
}

TEST(Tuner, AsksAgainForWhatWasRefusedWhenThereIsMoreMemory) {
  Job run = scarce();
  run.refuses = [](const Degrees& /*degrees*/) { return true; };
  run.steps(500);
  EXPECT_EQ(run.now, (Degrees{1, 1, 1}));
  EXPECT_GT(run.refused.size(), 1u);
  for (const auto& [degrees, times] : run.refused) EXPECT_EQ(times, 1);
  // Still scarce, but less.
  run.refuses = {};
  run.cluster.activations -= 0.06 * 40e9;
  ASSERT_LT(run.cluster.free(run.now), 0.1 * 40e9);
  run.steps(15);
  EXPECT_NE(run.now, (Degrees{1, 1, 1}));
  EXPECT_GE(run.cluster.free(run.now), 0.1 * 40e9);
  expect_same_again(run);
}

TEST(Tuner, TakesChangesOfOthersAsTheyCome) {
  Cluster cluster = gpus(1, 1e9);
  Job run(cluster, {2, 2, 2});
  run.steps(50);
  run.now = {4, 4, 4};
  run.steps(200);
  EXPECT_LE(run.cluster.seconds(run.now), 1.05 * run.cluster.seconds(run.cluster.best()));
}

TEST(Tuner, OneRankHasNoChoice) {
  Cluster cluster = gpus(1, 1e9);
  cluster.facts.host_of = {0};
  Job run(cluster, {1, 1, 1});
  run.steps(100);
  EXPECT_EQ(run.changes, 0);
}

using RecordFile = os::Scratch;

TEST_F(RecordFile, ReplayMakesTheSameDecisions) {
  Cluster cluster = gpus(4, 1e9);
  cluster.noise = 0.05;
  cluster.place = 40e9;
  cluster.activations = 5e9;
  Job run(cluster, {16, 16, 16});
  run.steps(300);
  run.cluster.activations = 33e9;
  run.steps(700);
  {
    Record record(folder_ / "dial.jsonl");
    record.begin(cluster.facts, cluster.links, TunerOptions{});
    for (const Recorded& one : run.told) record.add(one.seen, one.decision);
  }
  const Replay replayed = replay(os::files().read(folder_ / "dial.jsonl"));
  ASSERT_EQ(replayed.recorded.size(), 1000u);
  int decisions = 0;
  for (size_t i = 0; i < replayed.recorded.size(); ++i) {
    const std::optional<Decision>&was = replayed.recorded[i].decision, &is = replayed.decided[i];
    ASSERT_EQ(was.has_value(), is.has_value()) << "step " << i + 1;
    if (!was) continue;
    EXPECT_EQ(was->degrees, is->degrees);
    EXPECT_EQ(was->why, is->why);
    ++decisions;
  }
  EXPECT_GE(decisions, 3);
}

TEST_F(RecordFile, WhatIsNoRecordIsCorruption) {
  EXPECT_THROW(replay("{\"step\": 1}\n"), Corruption);
  EXPECT_THROW(replay("nonsense\n"), Corruption);
  EXPECT_TRUE(replay("").recorded.empty());
}

}  // namespace
}  // namespace tesserae::dial
