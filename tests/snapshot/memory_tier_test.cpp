#include "tesserae/snapshot/memory_tier.h"

#include <ATen/ops/randint.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::snapshot {
namespace {

std::vector<at::Tensor> copies_of_state(optim::Optimizer& optimizer) {
  std::vector<at::Tensor> copies;
  optimizer.visit_state(
      [&copies](const shard::Shard&, std::string_view, at::Tensor& tensor) { copies.push_back(tensor.clone()); });
  return copies;
}

// A run may go back to a snapshot that is older than the optimizer's state: of fp16 steps that all overflowed, say.
TEST(MemoryTier, ASnapshotWithoutStateOfTheOptimizerMakesItNew) {
  const std::string folder = cat("/tmp/tesserae-memory-tier-", ::getpid());  // of which only the name is used
  comm::run_local(2, [&](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    model::Gpt model(model::GptConfig{.vocabulary = 16, .dimension = 8, .layers = 1, .heads = 1});
    auto sharded = shard::shard_model(model, job, {});
    optim::AdamW optimizer(sharded, {});
    const at::Tensor tokens = at::randint(16, {1, 4}, at::kLong);
    const auto step = [&] {
      sharded.zero_grad();
      model->forward(tokens, tokens).backward();
      optimizer.step({});
    };
    MemoryTier tier({std::make_shared<comm::MeshFabric>(job), sharded, optimizer}, {2, {2, 2, 2}}, folder);
    tier.save(0, {{"of", "the beginning"}});
    tier.wait_copied();
    step();
    const std::vector<at::Tensor> after = copies_of_state(optimizer);
    ASSERT_FALSE(after.empty());

    const auto restored = tier.restore(0);
    ASSERT_TRUE(restored);
    EXPECT_EQ(restored->step, 0);
    for (const at::Tensor& tensor : copies_of_state(optimizer)) EXPECT_EQ(tensor.abs().sum().item<double>(), 0);
    checkpoint::publish_model(sharded);
    step();  // from the same parameters, as if it were the first
    const std::vector<at::Tensor> again = copies_of_state(optimizer);
    ASSERT_EQ(again.size(), after.size());
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(again[i].equal(after[i]));
    tier.remove();
  });
}

}  // namespace
}  // namespace tesserae::snapshot
