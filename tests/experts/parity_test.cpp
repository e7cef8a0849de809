// Expert parallelism: every (T, E, P, G, O) of 4 ranks against one process on the same global batches.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tests/experts/net.h"
#include "tests/shard/net.h"
#include "tests/support/ranks.h"

namespace tesserae::testing {
namespace {

constexpr int parity_ranks = 4, parity_steps = 10;
constexpr double parity_tolerance = 1e-5;

std::string to_string(const MoeJob& job) {
  const MoeNetOptions& net = job.net;
  return cat("T=", job.axes.tensor, " E=", job.axes.expert, " ", mesh::to_string(job.strategy.degrees),
             job.strategy.free_after_forward ? "" : " kept", " accumulation ", job.accumulation,
             job.clip ? " clips" : "", job.adamw ? " adamw" : "", job.sync ? " sync" : "",
             net.checkpoint ? " checkpoints" : "", net.frozen_experts ? " frozen" : "", net.sequence ? " sequence" : "",
             net.shared_hidden > 0 ? " shared" : "", net.capacity_factor > 0 ? " capacity" : "",
             net.routing.bias_rate > 0 ? " bias" : "", net.routing.scores == experts::Scores::sigmoid ? " sigmoid" : "",
             " top ", net.routing.chosen);
}

/// Every (T, E, P, G, O); the other choices follow from how many there have been, so that each meets each degree.
std::vector<MoeJob> parity_jobs() {
  std::vector<MoeJob> jobs;
  for (const mesh::AxisDegrees& axes :
       {mesh::AxisDegrees{.expert = 4}, {.expert = 2}, {.tensor = 2, .expert = 2}, {.tensor = 2}, {.tensor = 4}, {}}) {
    for (const auto& degrees : mesh::all_degrees(parity_ranks / axes.tensor)) {
      const auto i = static_cast<unsigned>(jobs.size());
      const bool frees = i % 3 != 1;
      MoeJob job{.axes = axes, .strategy = {degrees, frees, frees || i % 2 == 0}};
      job.accumulation = static_cast<int>(i % 5 < 3 ? 0 : i % 5 - 2);
      job.clip = i % 2 == 1;
      job.adamw = i % 7 == 6;
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

Trace train_moe(const std::shared_ptr<comm::Fabric>& fabric, const MoeJob& job) {
  MoeRank rank(fabric, job);
  Trace trace;
  for (int step = 0; step < parity_steps; ++step) {
    const auto result = rank.step(step, step == 0);
    trace.losses.push_back(result.loss);
    trace.norms.push_back(result.norm);
    if (step == 0) trace.gradients = result.gradients;
  }
  trace.parameters = rank.parameters();
  trace.pool_misses = rank.sharded().statistics().pool_misses;
  return trace;
}

Trace reference_of(MoeJob job) {
  job.axes = {};
  job.strategy = {};
  job.sync = job.net.sequence = job.net.checkpoint = false;
  if (job.accumulation == 2) job.accumulation = 1;
  static std::map<std::string, Trace> known;
  const auto [found, fresh] = known.try_emplace(to_string(job));
  if (fresh) {
    found->second = train_moe(comm::Fabric::null(mesh::World::single_host(0, 1)), job);
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
double compare_jobs(const std::shared_ptr<comm::Fabric>& fabric) {
  double worst = 0;
  for (const MoeJob& job : parity_jobs()) {
    SCOPED_TRACE(to_string(job));
    const Trace trace = train_moe(fabric, job);
    // In an accumulation whole gradients of all units stay.
    if (job.accumulation == 0) {
      EXPECT_EQ(trace.pool_misses, 0u) << "requests that found no buffer in the pool";
    }
    if (fabric->rank() != 0) continue;
    const Trace expected = reference_of(job);
    const double way = std::max(relative(trace.losses, expected.losses), relative(trace.norms, expected.norms));
    const double gradients = worst_of(trace.gradients, expected.gradients);
    const double parameters = worst_of(trace.parameters, expected.parameters);
    EXPECT_LE(way, parity_tolerance) << "losses and gradient norms";
    EXPECT_LE(gradients, parity_tolerance) << "gradients of the first step";
    // AdamW amplifies the order of summation where a gradient is nearly zero.
    EXPECT_LE(parameters, job.adamw ? 1e-2 : parity_tolerance) << "parameters after " << parity_steps << " steps";
    worst = std::max({worst, way, gradients, job.adamw ? 0 : parameters});
  }
  return worst;
}

TEST(ExpertParity, FourThreads) {
  double worst = 0;
  comm::run_local(parity_ranks, [&](comm::Fabric& fabric) {
    const double mine = compare_jobs(shard::testing::share(fabric));
    if (fabric.rank() == 0) worst = mine;
  });
  std::printf("%zu layouts, %d steps: worst relative difference %.1e\n", parity_jobs().size(), parity_steps, worst);
}

RANK_MAIN(expert_parity) {
  report("worst", compare_jobs(comm::Fabric::connect(mesh::World::from_environment())));
}

TEST(ExpertParity, FourProcesses) {
  const auto results = run_ranks("expert_parity", parity_ranks, {}, std::chrono::seconds(300));
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  std::printf("the same in processes: worst relative difference %.1e\n", results[0].value("worst"));
}

TEST(ExpertParity, LowPrecisionStaysClose) {
  MoeJob job{.axes = {.expert = 2}, .strategy = mesh::preset("FULL_SHARD", parity_ranks)};
  const Trace expected = reference_of(job);
  job.bf16 = true;
  comm::run_local(parity_ranks, [&](comm::Fabric& fabric) {
    const Trace trace = train_moe(shard::testing::share(fabric), job);
    EXPECT_LE(relative(trace.losses, expected.losses), 3e-2);
  });
}

}  // namespace
}  // namespace tesserae::testing
