#include "tesserae/dial/facts.h"

#include <gtest/gtest.h>

#include "tesserae/cost/memory.h"
#include "tests/shard/net.h"

namespace tesserae::dial {
namespace {

TEST(DialFacts, WhatIsFrozenHasNoStateAndNoGradients) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    const auto facts = [&](int frozen_block) {
      shard::testing::Net net(shard::testing::NetOptions{.frozen_block = frozen_block});
      shard::testing::fill_all(*net);
      int64_t all = 0, trained = 0;
      for (const at::Tensor& parameter : net->parameters()) {
        all += parameter.numel();
        trained += parameter.requires_grad() ? parameter.numel() : 0;
      }
      shard::Sharded sharded = shard::shard_model(net, shard::testing::share(fabric));
      const cost::Facts found = facts_of(sharded.engine(), 2, 1);
      EXPECT_EQ(found.parameters, all);
      EXPECT_DOUBLE_EQ(found.trained, static_cast<double>(trained) / static_cast<double>(all));
      return found;
    };
    const mesh::Degrees whole{1, 1, 1};
    const cost::Facts all = facts(-1), some = facts(1);
    EXPECT_EQ(all.trained, 1);
    EXPECT_LT(cost::memory_of(some, whole), cost::memory_of(all, whole));
  });
}

TEST(DialFacts, WhatIsFrozenIsGatheredAndNotReduced) {
  comm::run_local(2, [](comm::Fabric& fabric) {
    shard::testing::Net net(shard::testing::NetOptions{.dimension = 128, .hidden = 512, .frozen_matrix = true});
    shard::testing::fill_all(*net);
    shard::Sharded sharded = shard::shard_model(net, shard::testing::share(fabric), shard::testing::fully_sharded(2));
    const cost::Facts facts = facts_of(sharded.engine(), 2, 1);
    EXPECT_EQ(facts.trained_root, 1);
    EXPECT_NEAR(facts.trained_unit, 0.5, 0.01);
    const auto batch = shard::testing::batch_of(net->options, 0, fabric.rank(), 2);
    net(batch.tokens, batch.targets).backward();
    const cost::RankMemory planned = cost::memory_of_rank(facts, {2, 2, 2}, fabric.rank());
    const auto buffers = static_cast<double>(sharded.statistics().pool_reserved_bytes);
    EXPECT_NEAR(buffers, planned.gathered + planned.reductions, 0.02 * buffers);  // chunks are padded
  });
}

}  // namespace
}  // namespace tesserae::dial
