#include "tesserae/shard/sharding.h"

#include <ATen/ops/empty.h>
#include <gmock/gmock.h>

#include "tesserae/base/error.h"
#include "tesserae/experts/moe.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/split_parameters.h"
#include "tests/experts/ranks.h"

// Which ranks shard what, by how many.
namespace tesserae::experts {
namespace {

using ::testing::HasSubstr;
using testing::run_mesh;

using RootMoe = shard::Unit<Moe>;

RootMoe small_moe(const tensor::ParallelPtr& parallel) {
  const MoeOptions options{.routing = {.width = 16, .experts = 8, .chosen = 2}, .hidden = 8};
  RootMoe moe(options, tensor::LayerOptions{parallel});
  tensor::fill_parameters(*moe, testing::fill);
  return moe;
}

shard::Options options_of(const tensor::ParallelPtr& parallel, const mesh::Degrees& degrees) {
  shard::Options options;
  options.strategy.degrees = degrees;
  options.mesh = parallel->mesh();
  return options;
}

TEST(ExpertSharding, ExpertsShardOverTheRanksThatHoldThem) {
  for (const auto& [axes, experts] : {std::pair<mesh::AxisDegrees, mesh::Degrees>{{.expert = 1}, {2, 4, 4}},
                                      {{.expert = 2}, {2, 2, 2}},
                                      {{.expert = 4}, {1, 1, 1}}}) {
    run_mesh(4, axes, [&](const tensor::ParallelPtr& parallel) {
      comm::MeshFabric& mesh = *parallel->mesh();
      auto sharded =
          shard::shard_model(small_moe(parallel), mesh.over(mesh::axes::state), options_of(parallel, {2, 4, 4}));
      const auto& units = sharded.engine().units();
      ASSERT_EQ(units.size(), 2u);
      EXPECT_EQ(units[0]->sharding().layout.degrees(), (mesh::Degrees{2, 4, 4}));
      EXPECT_EQ(units[1]->sharding().layout.degrees(), experts);
      EXPECT_EQ(units[1]->sharding().ranks, 4) << "gradients are averaged over the whole batch";
      // An equal part of all on each rank, whatever E is: masters and, before the first step, nothing else.
      const int64_t all = 8 * 3 * 8 * 16;
      EXPECT_EQ(units[1]->buffers()[0]->parameter().local().numel(), all / 4);
      EXPECT_EQ(sharded.parameter_count(), all + 8 * 16);
      sharded.reshard({4, 4, 4});
      EXPECT_EQ(units[0]->sharding().layout.degrees(), (mesh::Degrees{4, 4, 4}));
      EXPECT_EQ(units[1]->sharding().layout.degrees(), mesh::limited({4, 4, 4}, 4 / axes.expert));
      EXPECT_EQ(sharded.reshard({4, 4, 4}).bytes, 0u);
      EXPECT_THROW(sharded.reshard({3, 3, 3}), InvalidArgument);
    });
  }
}

TEST(ExpertSharding, RefusesAMeshThatItIsNotGiven) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    shard::Options options = options_of(parallel, {1, 1, 1});
    options.mesh = nullptr;
    try {
      shard::shard_model(small_moe(parallel), parallel->mesh()->job(), options);
      ADD_FAILURE() << "there is no expert axis";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("pass Options::mesh"));
    }
  });
}

/// Experts beside something else in one unit.
class MixedImpl : public ExpertsImpl {
 public:
  explicit MixedImpl(const tensor::ParallelPtr& parallel)
      : ExpertsImpl(ExpertsOptions{.experts = 4, .width = 4, .hidden = 4}, tensor::LayerOptions{parallel}) {
    register_parameter("other", at::empty({4}));
  }
};

TEST(ExpertSharding, AUnitIsShardedOverOneSetOfRanks) {
  run_mesh(2, {.expert = 2}, [](const tensor::ParallelPtr& parallel) {
    shard::Unit<MixedImpl> mixed(parallel);
    try {
      shard::shard_model(mixed, parallel->mesh()->job(), options_of(parallel, {1, 1, 1}));
      ADD_FAILURE() << "the two cannot be gathered together";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("has gate, whose state is sharded over expert_data, and other"));
      EXPECT_THAT(error.what(), HasSubstr("a unit of its own"));
    }
  });
}

}  // namespace
}  // namespace tesserae::experts
