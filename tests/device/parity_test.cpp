// Four processes that share one device train like one process on the CPU, under every layout (P, G, O), and with
// accumulation and buffers that come and go.

#include <gtest/gtest.h>

#include "tesserae/mesh/layout.h"
#include "tests/device/device.h"
#include "tests/shard/net.h"
#include "tests/support/ranks.h"

namespace tesserae::shard {
namespace {

using tesserae::testing::run_ranks;
namespace net = testing;

// Sums are formed in another order than on one process, and a GPU's kernels round in ways of their own.
constexpr double kTolerance = 1e-4;

void expect_parity(comm::Fabric& fabric, const net::Training& run, const std::string& what) {
  const net::Reference expected = net::train_reference(run.net, run.steps, run.lr, run.micro);
  const net::Reference actual = net::train_sharded(fabric, run);
  EXPECT_LE(net::worst_difference(actual.parameters, expected.parameters), kTolerance) << what;
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(actual.losses[step], expected.losses[step], kTolerance * expected.losses[step]) << what;
  }
}

}  // namespace

RANK_MAIN(device_parity) {
  comm::FabricOptions options;
  options.backend = "staged";
  options.device = tesserae::testing::test_device();
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment(), options);
  for (const auto& degrees : mesh::all_degrees(fabric->size())) {
    net::Training run;
    run.options.strategy = {degrees, true, true};
    expect_parity(*fabric, run, mesh::to_string(degrees));
  }
  net::Training run;
  run.options.strategy = {{fabric->size(), fabric->size(), fabric->size()}, true, true};
  run.micro = 2;
  expect_parity(*fabric, run, "accumulation");
  run.options.elastic = true;
  expect_parity(*fabric, run, "buffers that come and go");
}

TEST(DeviceParity, FourProcessesOnOneDevice) {
  const auto results = run_ranks("device_parity", 4, {}, std::chrono::seconds(240));
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace tesserae::shard
