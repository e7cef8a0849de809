// Activations that are in host memory between forward and backward (offload/pinned_shelf.h): copies on streams of their
// own beside the computation, which no delay makes wrong.

#include "tesserae/offload/activations.h"

#include <ATen/ATen.h>

#include "tesserae/shard/activation_offload.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimActivations : public Sim {};

std::shared_ptr<offload::Activations> leaving() {
  return offload::Activations::make({.horizon = 2, .smallest = 1, .folder = {}});
}

}  // namespace

TEST_F(SimActivations, ChangeNoBit) {
  for (const bool recomputes : {false, true}) {
    shard::testing::Training run;
    run.net.blocks = 6;
    run.net.checkpoint = recomputes;
    run.options.strategy = {{2, 2, 2}, true, true};
    std::vector<double> expected;
    for (uint64_t seed = 0; seed < seeds_of(7) + 1; ++seed) {
      restart({.seed = seed});
      run_on_devices(2, [&](comm::Fabric& fabric) {
        shard::testing::Training own = run;
        const auto activations = leaving();
        if (seed > 0) {
          own.attach = [&](shard::Sharded& sharded) { offload_activations(sharded.engine(), activations); };
        }
        const auto losses = train_sharded(fabric, own).losses;
        if (seed > 0) {
          EXPECT_GT(activations->counters().in, 0);
          EXPECT_EQ(activations->shelf(), "pinned memory of the host");
        }
        if (fabric.rank() != 0) return;
        if (expected.empty()) expected = losses;
        EXPECT_EQ(losses, expected) << "seed " << seed;
      });
    }
  }
}

TEST_F(SimActivations, TheHostWaitsForNothing) {
  run_on_devices(2, [&](comm::Fabric& fabric) {
    shard::testing::Net net{shard::testing::NetOptions{.blocks = 6}};
    shard::testing::fill_all(*net);
    shard::Options options;
    options.strategy = {{2, 2, 2}, true, true};
    auto sharded = shard::shard_model(net, shard::testing::share(fabric), options);
    const auto activations = leaving();
    offload_activations(sharded.engine(), activations);
    const auto batch = shard::testing::batch_of({}, 0, fabric.rank(), 2);
    const at::Tensor tokens = batch.tokens.to(fabric.device()), targets = batch.targets.to(fabric.device());
    const auto step = [&] {
      net(tokens, targets).backward();
      sharded.zero_grad();
    };
    step();
    step();
    const auto before = activations->counters();
    const Counters spent = spent_by_third(fabric.device().index(), step);
    EXPECT_EQ(spent.synchronizations, 0);
    EXPECT_GT(activations->counters().out, before.out);
  });
}

}  // namespace tesserae::sim
