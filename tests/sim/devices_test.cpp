// Several devices in a process: which device is the thread's current one decides nothing, for a model knows its own.

#include <ATen/ATen.h>

#include "tesserae/base/error.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

namespace net = shard::testing;

constexpr double tolerance = 1e-5;

class SimDevices : public Sim {};

}  // namespace

// A script that has not chosen a device: the current one is that of another rank, which trains there.
TEST_F(SimDevices, TheCurrentOneMayBeAnothers) {
  constexpr int ranks = 4;
  for (const bool elastic : {false, true}) {
    net::Training run;
    run.options.strategy = {{4, 4, 4}, true, true};
    run.options.elastic = elastic;
    const auto expected = net::train_reference(run.net, run.steps, run.lr);
    for (uint64_t seed = 0; seed < 6; ++seed) {
      restart({.seed = seed});
      run_on_devices(ranks, [&](comm::Fabric& fabric) {
        const c10::DeviceGuard elsewhere(device(static_cast<c10::DeviceIndex>((fabric.rank() + 1) % ranks)));
        const auto result = net::train_sharded(fabric, run);
        EXPECT_LE(net::worst_difference(result.parameters, expected.parameters), tolerance) << "seed " << seed;
      });
    }
  }
}

// Two models of one thread on two devices, neither of them the current one, step by turns.
TEST_F(SimDevices, AThreadTrainsAModelOnEach) {
  const net::NetOptions options;
  const auto expected = net::train_reference(options, 3, 0.5);
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    restart({.seed = seed});
    std::vector<net::Net> models;
    std::vector<std::shared_ptr<comm::Fabric>> fabrics;
    std::vector<shard::Sharded> sharded;
    for (const c10::DeviceIndex index : {1, 3}) {
      models.emplace_back(options);
      net::fill_all(*models.back());
      fabrics.push_back(comm::Fabric::null(mesh::World::single_host(0, 1), device(index)));
      shard::Options sharding;
      sharding.elastic = index == 3;
      sharded.push_back(shard::shard_model(models.back(), fabrics.back(), sharding));
    }
    for (int64_t step = 0; step < 3; ++step) {
      std::vector<at::Tensor> losses;
      for (size_t i = 0; i < models.size(); ++i) {
        const auto batch = net::batch_of(options, step, 0, 1);
        losses.push_back(models[i](batch.tokens.to(fabrics[i]->device()), batch.targets.to(fabrics[i]->device())));
      }
      for (const at::Tensor& loss : losses) loss.backward();
      for (auto& one : sharded) net::sgd(one, 0.5);
      for (const at::Tensor& loss : losses) {
        EXPECT_NEAR(loss.item<double>(), expected.losses[static_cast<size_t>(step)], 1e-5) << "seed " << seed;
      }
    }
    for (auto& one : sharded) {
      net::Values values;
      one.visit_parameters([&](const std::string& name, const at::Tensor& value) { values[name] = value.cpu(); });
      EXPECT_LE(net::worst_difference(values, expected.parameters), tolerance) << "seed " << seed;
    }
    EXPECT_EQ(current_device(), 0);
  }
}

// Nothing of ours moves tensors between such devices; alone a rank moves none.
TEST_F(SimDevices, AJobOfOneRankNeedsNoBackend) {
  comm::FabricOptions options;
  options.device = device(0);
  EXPECT_EQ(comm::Fabric::connect(mesh::World::single_host(0, 1), options)->size(), 1);
  EXPECT_THROW(comm::Fabric::connect(mesh::World::single_host(0, 2), options), InvalidArgument);
}

}  // namespace tesserae::sim
