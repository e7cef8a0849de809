// Activations that are in host memory between forward and backward (offload/pinned_shelf.h): copies on streams of their
// own beside the computation, which no delay makes wrong.

#include "tesserae/offload/activations.h"

#include <ATen/ATen.h>

#include "tesserae/offload/pinned_shelf.h"
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

namespace {

constexpr int64_t elements = 3000;

/// A tensor that is computed slowly, as put on a shelf; it and nobody else has gone from the device.
std::shared_ptr<offload::Shelved> shelved(offload::Shelf& shelf, double value) {
  const auto put = [&](double sum) {
    const at::Tensor tensor = at::zeros({elements}, on_device());
    for (int i = 0; i < 4; ++i) tensor.add_(sum / 4);
    return shelf.put(tensor.storage());
  };
  auto first = put(value);
  shelf.end_unit();
  const auto second = put(value + 1);
  shelf.end_unit();
  return first;
}

at::Tensor shown(const c10::Storage& storage) {
  at::Tensor tensor = at::empty({0}, on_device());
  tensor.set_(storage, 0, {elements}, {1});
  return tensor;
}

bool all_are(const at::Tensor& tensor, float value) {
  return at::equal(tensor.cpu(), at::full({elements}, value));
}

}  // namespace

TEST_F(SimActivations, MayBeTakenOnAnotherStreamThanTheyWerePut) {
  EXPECT_EQ(right([] {
              const auto shelf = offload::make_pinned_shelf(device(0));
              const auto first = shelved(*shelf, 4);
              const c10::StreamGuard on_stream(side_stream());
              return all_are(shown(first->take()), 4);
            }),
            seeds);
}

TEST_F(SimActivations, AreLetGoOfWhileTheyArrive) {
  EXPECT_EQ(right([] {
              const auto shelf = offload::make_pinned_shelf(device(0));
              auto first = shelved(*shelf, 4);
              first->load();
              first = nullptr;
              return all_are(at::full({elements}, 3.0f, on_device()), 3);  // in memory where it was to arrive
            }),
            seeds);
}

TEST_F(SimActivations, LeaveTheirPlaceOnTheShelfOnceTheyHaveArrived) {
  EXPECT_EQ(right([] {
              const auto shelf = offload::make_pinned_shelf(device(0));
              auto first = shelved(*shelf, 4);
              const at::Tensor taken = shown(first->take());
              first = nullptr;
              std::vector<std::shared_ptr<offload::Shelved>> next;
              {
                const c10::StreamGuard on_stream(side_stream());  // which has waited for nothing
                for (int i = 0; i < 3; ++i) {
                  next.push_back(shelf->put(at::full({elements}, 7.0f, on_device()).storage()));
                }
              }
              return all_are(taken, 4);
            }),
            seeds);
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
