// The dial in a job whose units shard over different ranks.

#include <gtest/gtest.h>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tests/experts/net.h"
#include "tests/shard/net.h"

namespace tesserae::testing {
namespace {

std::map<std::string, at::Tensor> state_of(MoeRank& rank) {
  auto values = rank.parameters();
  for (shard::FlatBuffer* buffer : rank.sharded().engine().buffers()) {
    rank.optimizer().visit_state([&](const shard::Shard& shard, std::string_view name, at::Tensor& tensor) {
      if (buffer->shard() != &shard || tensor.dim() == 0) return;
      const at::Tensor flat = buffer->parameter().whole_values(tensor);
      for (const auto& slot : buffer->flat().slots()) {
        values[cat(name, " ", slot.names.front())] = flat.narrow(0, slot.begin, slot.elements).clone();
      }
    });
  }
  return values;
}

TEST(ExpertDial, ATurnMovesBothKindsOfUnitsBitwise) {
  for (const mesh::AxisDegrees& axes : {mesh::AxisDegrees{.expert = 2}, {.expert = 4}, {.tensor = 2, .expert = 2}}) {
    comm::run_local(4, [&](comm::Fabric& fabric) {
      MoeJob job{.axes = axes, .adamw = true};
      const auto all = mesh::all_degrees(4 / axes.tensor);
      job.strategy.degrees = all.back();
      MoeRank rank(shard::testing::share(fabric), job);
      rank.step(0);
      for (const mesh::Degrees& degrees : all) {
        const auto before = state_of(rank);
        rank.sharded().reshard(degrees);
        const auto after = state_of(rank);
        ASSERT_EQ(before.size(), after.size());
        for (const auto& [name, value] : before) {
          EXPECT_TRUE(after.at(name).equal(value)) << to_string(degrees) << ": " << name;
        }
        for (const auto& unit : rank.sharded().engine().units()) {
          EXPECT_EQ(unit->sharding().layout.degrees(), mesh::limited(degrees, unit->sharding().fabric->size()));
        }
      }
    });
  }
}

TEST(ExpertDial, TrainingGoesOnAsIfNothingHadHappened) {
  for (const mesh::AxisDegrees& axes : {mesh::AxisDegrees{.expert = 2}, {.expert = 4}}) {
    MoeJob job{.axes = axes, .strategy = mesh::preset("FULL_SHARD", 4)};
    std::vector<double> straight, turned;
    for (const bool turns : {false, true}) {
      comm::run_local(4, [&](comm::Fabric& fabric) {
        MoeRank rank(shard::testing::share(fabric), job);
        for (int step = 0; step < 6; ++step) {
          if (turns && step == 2) rank.sharded().reshard({1, 2, 4});
          if (turns && step == 4) rank.sharded().reshard({2, 2, 2});
          const double loss = rank.step(step).loss;
          if (fabric.rank() == 0) (turns ? turned : straight).push_back(loss);
        }
      });
    }
    for (size_t i = 0; i < straight.size(); ++i) EXPECT_NEAR(turned[i], straight[i], 1e-5 * straight[i]) << i;
  }
}

}  // namespace
}  // namespace tesserae::testing
