// Expert parallelism: every (T, E, P, G, O) of 4 ranks, and a quarter of those of 8, against one process on the same
// global batches.

#include <gtest/gtest.h>
#include <algorithm>

#include <cmath>
#include <cstdio>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tests/experts/net.h"
#include "tests/shard/net.h"
#include "tests/support/ranks.h"

namespace tesserae::testing {
namespace {

constexpr double parity_tolerance = 1e-5;

std::string to_string(const MoeJob& job) {
  const MoeNetOptions& net = job.net;
  return cat("T=", job.axes.tensor, " E=", job.axes.expert, " ", mesh::to_string(job.strategy.degrees),
             job.strategy.free_after_forward ? "" : " kept", " accumulation ", job.accumulation,
             job.clip ? " clips" : "", job.adamw ? " adamw" : "", job.sync ? " sync" : "", job.rows ? " rows" : "",
             net.checkpoint ? " checkpoints" : "", net.frozen_experts ? " frozen" : "", net.sequence ? " sequence" : "",
             net.shared_hidden > 0 ? " shared" : "", net.capacity_factor > 0 ? " capacity" : "",
             net.routing.bias_rate > 0 ? " bias" : "", net.routing.scores == experts::Scores::sigmoid ? " sigmoid" : "",
             " top ", net.routing.chosen, net.dtype == at::kDouble ? " fp64" : "");
}

/// How many ranks, and how much of it a machine has time for.
struct ParitySize {
  int ranks, steps;
};
constexpr ParitySize four_ranks{.ranks = 4, .steps = 10}, eight_ranks{.ranks = 8, .steps = 3};

/// Every (T, E, P, G, O) with experts to share out, and of those without; of 8 ranks every fourth, without
/// accumulation. The other choices follow from how many there have been, so that each meets each degree.
std::vector<MoeJob> parity_jobs(const ParitySize& size) {
  std::vector<MoeJob> jobs;
  const bool all = size.ranks == 4;
  unsigned seen = 0;
  for (const mesh::AxisDegrees& axes : {mesh::AxisDegrees{.expert = 8},
                                        {.expert = 4},
                                        {.expert = 2},
                                        {.tensor = 2, .expert = 4},
                                        {.tensor = 2, .expert = 2},
                                        {.tensor = 4, .expert = 2},
                                        {.tensor = 2},
                                        {.tensor = 4},
                                        {}}) {
    if (axes.tensor * axes.expert > size.ranks || (!all && axes.expert == 1)) continue;
    for (const auto& degrees : mesh::all_degrees(size.ranks / axes.tensor)) {
      if (!all && seen++ % 4 != 0) continue;
      const auto i = static_cast<unsigned>(jobs.size());
      const bool frees = i % 3 != 1;
      MoeJob job{.axes = axes, .strategy = {degrees, frees, frees || i % 2 == 0}};
      if (i % 2 == 1) job.net.dtype = at::kDouble;
      job.accumulation = all && i % 5 >= 3 ? static_cast<int>(i % 5) - 2 : 0;
      job.clip = i % 2 == 1;
      job.adamw = i % 7 == 6;
      job.rows = i % 4 == 2;
      job.sync = i % 4 == 2 && axes.tensor == 1;
      job.net.checkpoint = i % 3 == 2;
      job.net.frozen_experts = i % 8 == 5;
      job.net.sequence = axes.tensor > 1 && i % 2 == 0;
      job.net.shared_hidden = i % 4 == 1 ? 8 : 0;
      job.net.capacity_factor = i % 6 == 4 ? 1.25 : 0;
      if (i % 4 == 3) {
        job.net.routing = {.chosen = 3, .scores = experts::Scores::sigmoid, .scale = 1.5, .bias_rate = 0.01};
      } else if (i % 5 == 0) {
        job.net.routing = {.chosen = 1, .normalised = false, .balance_loss = 0.01};
      }
      jobs.push_back(job);
    }
  }
  return jobs;
}

struct Trace {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> gradients, parameters;  // of the first step; after the last
  uint64_t pool_misses = 0;
};

/// Ten steps with momentum make of a last bit of fp32 more than the tolerance, on some processors' kernels.
Trace train_moe(const std::shared_ptr<comm::Fabric>& fabric, const MoeJob& job, int steps) {
  if (job.net.dtype == at::kFloat && !job.bf16) steps = std::min(steps, 3);
  MoeRank rank(fabric, job);
  Trace trace;
  for (int step = 0; step < steps; ++step) {
    const auto result = rank.step(step, step == 0);
    trace.losses.push_back(result.loss);
    trace.norms.push_back(result.norm);
    if (step == 0) trace.gradients = result.gradients;
  }
  trace.parameters = rank.parameters();
  trace.pool_misses = rank.sharded().statistics().pool_misses;
  return trace;
}

Trace reference_of(MoeJob job, int steps) {
  job.axes = {};
  job.strategy = {};
  job.sync = job.rows = job.net.sequence = job.net.checkpoint = false;
  if (job.accumulation == 2) job.accumulation = 1;
  static std::map<std::string, Trace> known;
  const auto [found, fresh] = known.try_emplace(cat(to_string(job), " ", steps));
  if (fresh) {
    found->second = train_moe(comm::Fabric::null(mesh::World::single_host(0, 1)), job, steps);
  }
  return found->second;
}

double relative(const std::vector<double>& actual, const std::vector<double>& expected) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(actual.at(i) - expected[i]) / std::abs(expected[i]);
    worst = std::isfinite(difference) ? std::max(worst, difference) : 1e9;
  }
  return worst;
}

/// Trains as this rank of `fabric`, all jobs one after the other; rank 0 compares. The worst difference.
double compare_jobs(const std::shared_ptr<comm::Fabric>& fabric, const ParitySize& size) {
  double worst = 0;
  for (const MoeJob& job : parity_jobs(size)) {
    SCOPED_TRACE(to_string(job));
    const Trace trace = train_moe(fabric, job, size.steps);
    // In an accumulation whole gradients of all units stay.
    if (job.accumulation == 0) {
      EXPECT_EQ(trace.pool_misses, 0u) << "requests that found no buffer in the pool";
    }
    if (fabric->rank() != 0) continue;
    const Trace expected = reference_of(job, size.steps);
    const double way = std::max(relative(trace.losses, expected.losses), relative(trace.norms, expected.norms));
    const double gradients = worst_of(trace.gradients, expected.gradients);
    const double parameters = worst_of(trace.parameters, expected.parameters);
    EXPECT_LE(way, parity_tolerance) << "losses and gradient norms";
    EXPECT_LE(gradients, parity_tolerance) << "gradients of the first step";
    // AdamW amplifies the order of summation where a gradient is nearly zero.
    EXPECT_LE(parameters, job.adamw ? 1e-2 : parity_tolerance) << "parameters after " << size.steps << " steps";
    worst = std::max({worst, way, gradients, job.adamw ? 0 : parameters});
  }
  return worst;
}

void compare_threads(const ParitySize& size) {
  double worst = 0;
  comm::run_local(size.ranks, [&](comm::Fabric& fabric) {
    const double mine = compare_jobs(shard::testing::share(fabric), size);
    if (fabric.rank() == 0) worst = mine;
  });
  std::printf("%zu layouts of %d ranks, %d steps: worst relative difference %.1e\n", parity_jobs(size).size(),
              size.ranks, size.steps, worst);
}

TEST(ExpertParity, FourThreads) {
  compare_threads(four_ranks);
}

TEST(ExpertParity, EightThreads) {
  compare_threads(eight_ranks);
}

RANK_MAIN(expert_parity) {
  report("worst", compare_jobs(comm::Fabric::connect(mesh::World::from_environment()), four_ranks));
}

TEST(ExpertParity, FourProcesses) {
  const auto results = run_ranks("expert_parity", four_ranks.ranks, {}, std::chrono::seconds(300));
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  std::printf("the same in processes: worst relative difference %.1e\n", results[0].value("worst"));
}

TEST(ExpertParity, LowPrecisionStaysClose) {
  MoeJob job{.axes = {.expert = 2}, .strategy = mesh::preset("FULL_SHARD", four_ranks.ranks)};
  MoeJob exact = job;
  exact.net.dtype = at::kDouble;
  const Trace expected = reference_of(exact, four_ranks.steps);
  ASSERT_EQ(expected.losses.size(), four_ranks.steps);
  job.bf16 = true;
  comm::run_local(four_ranks.ranks, [&](comm::Fabric& fabric) {
    const Trace trace = train_moe(shard::testing::share(fabric), job, four_ranks.steps);
    EXPECT_LE(relative(trace.losses, expected.losses), 3e-2);
  });
}

}  // namespace
}  // namespace tesserae::testing
