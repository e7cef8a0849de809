// What a training step may cost a device: waits of the host, launches, memory.

#include <ATen/ATen.h>

#include <limits>
#include <optional>

#include "tesserae/optim/adamw.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

constexpr int ranks = 4;

class SimBudget : public Sim {
 protected:
  /// What is trained: the engine's small network with AdamW, on each rank.
  struct Job {
    explicit Job(comm::Fabric& fabric) : model(options) {
      net::fill_all(*model);
      shard::Options sharding;
      sharding.strategy = {{2, 2, 4}, true, true};
      sharded.emplace(shard::shard_model(model, net::share(fabric), sharding));
      optimizer.emplace(*sharded, optim::AdamWOptions{.lr = 1e-2});
      const auto batch = net::batch_of(options, 0, fabric.rank(), fabric.size());
      tokens = batch.tokens.to(fabric.device());
      targets = batch.targets.to(fabric.device());
    }
    at::Tensor step(const optim::StepOptions& how) {
      at::Tensor loss = model(tokens, targets);
      loss.backward();
      result = optimizer->step(how);
      optimizer->zero_grad();
      return loss;
    }
    net::NetOptions options;
    net::Net model;
    std::optional<shard::Sharded> sharded;
    std::optional<optim::AdamW> optimizer;
    at::Tensor tokens, targets;
    optim::StepResult result;
  };
};

}  // namespace

TEST_F(SimBudget, ClippingWaitsForNothingAndTheNormIsOneWait) {
  run_on_devices(ranks, [&](comm::Fabric& fabric) {
    const auto waits = [&](const optim::StepOptions& how, bool reads_loss) {
      Job job(fabric);
      return spent_by_third(fabric.device().index(),
                            [&] {
                              const at::Tensor loss = job.step(how);
                              if (reads_loss) {
                                EXPECT_GT(loss.item<double>(), 0);
                              }
                            })
          .synchronizations;
    };
    EXPECT_EQ(waits({.clip_norm = 0.5, .measure_norm = false}, false), 0);
    EXPECT_EQ(waits({.clip_norm = 0.5, .measure_norm = false}, true), 1);
    EXPECT_EQ(waits({.clip_norm = 0.5}, false), 1) << "the norm, which the host asks for";
  });
}

TEST_F(SimBudget, ClippingOnTheDeviceIsThatOfTheHost) {
  run_on_devices(ranks, [&](comm::Fabric& fabric) {
    Job host(fabric), device(fabric);
    for (int step = 0; step < 4; ++step) {
      const double expected = host.step({.clip_norm = 0.005}).item<double>();
      EXPECT_GT(host.result.norm, 0.005) << "else nothing is clipped";
      EXPECT_NEAR(device.step({.clip_norm = 0.005, .measure_norm = false}).item<double>(), expected, 1e-5 * expected);
    }
  });
}

TEST_F(SimBudget, ANormThatIsNotFiniteUpdatesNothingOnTheDevice) {
  run_on_devices(ranks, [&](comm::Fabric& fabric) {
    Job job(fabric), undisturbed(fabric);
    const optim::StepOptions how{.clip_norm = 0.5, .measure_norm = false};
    job.step(how);
    undisturbed.step(how);
    const at::Tensor targets = job.targets;
    job.targets = at::full_like(targets, std::numeric_limits<double>::infinity());
    job.step(how);
    job.targets = targets;
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(job.step(how).item<double>(), undisturbed.step(how).item<double>())
          << "parameters, moments and the counter are as they were";
    }
  });
}

TEST_F(SimBudget, LaunchesOfAUnitAndMemoryOfAStep) {
  // In a step of the small network: forward, backward, its collectives, norm, clipping and update of a unit.
  constexpr int64_t launches_a_unit = 90;
  run_on_devices(ranks, [&](comm::Fabric& fabric) {
    Job job(fabric);
    const auto step = [&] { job.step({.clip_norm = 0.5, .measure_norm = false}); };
    step();
    step();
    const shard::Statistics before = job.sharded->statistics();
    const Counters spent = spent_by_third(fabric.device().index(), step);
    const shard::Statistics after = job.sharded->statistics();
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.pool_misses, before.pool_misses);
    EXPECT_EQ(after.pool_reserved_bytes, before.pool_reserved_bytes);
    EXPECT_LE(spent.launches, launches_a_unit * (job.options.blocks + 1)) << "rank " << fabric.rank();
    EXPECT_EQ(spent.copied_bytes, 0);
    EXPECT_EQ(spent.unknown_shapes, 0);
  });
}

}  // namespace tesserae::sim
