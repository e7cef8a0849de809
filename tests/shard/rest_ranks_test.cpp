// Where a unit rests between forward and backward, if the ranks that shard its state are not all of the job.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/shard/engine.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

/// After two steps in which units rest over `rest` ranks.
Values trained_from_rest(comm::MeshFabric& mesh, int rest) {
  const std::shared_ptr<comm::Fabric> fabric = mesh.over(mesh::axes::state);
  Net net{NetOptions{}};
  fill_all(*net);
  Options options;
  options.strategy = mesh::preset("FULL_SHARD", fabric->size());
  options.mesh = std::shared_ptr<comm::MeshFabric>(&mesh, [](comm::MeshFabric*) {});
  Sharded sharded = shard_model(net, fabric, options);
  for (const auto& unit : sharded.engine().units()) unit->set_rest_ranks(rest);
  for (int step = 0; step < 2; ++step) {
    const Batch batch = batch_of(net->options, step, fabric->rank(), fabric->size());
    net(batch.tokens, batch.targets).backward();
    sgd(sharded, 0.1);
  }
  Values values;
  sharded.visit_parameters([&](const std::string& name, const at::Tensor& value) { values[name] = value.clone(); });
  return values;
}

TEST(RestRanks, AreNeighboursAmongThoseThatShardTheState) {
  comm::run_local(8, [](comm::Fabric& job) {
    uint64_t before = 0;
    for (const int tensor : {1, 2}) {
      comm::MeshFabric mesh(share(job), mesh::Mesh(job.size(), {.tensor = tensor}));
      const auto sent = [&] {
        const uint64_t all = job.counters().all_gather.bytes;
        return all - std::exchange(before, all);
      };
      const Values expected = trained_from_rest(mesh, 0);
      const uint64_t whole = sent();
      EXPECT_EQ(worst_difference(trained_from_rest(mesh, 2), expected), 0) << "rank " << job.rank();
      EXPECT_LT(sent(), whole) << "rank " << job.rank();
    }
  });
}

}  // namespace
}  // namespace tesserae::shard::testing
