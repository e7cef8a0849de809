#include "tesserae/shard/same_unsplit.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/comm/error.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/shard/engine.h"
#include "tests/shard/net.h"

namespace tesserae::shard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// What a first forward says on two tensor-parallel ranks by `ranks` that shard the state, one of which began with
/// another value of `parameter` (none: "").
std::string said(int ranks, const std::string& strategy, const std::string& parameter, bool frozen = false) {
  std::string text;
  try {
    comm::run_local(2 * ranks, [&](comm::Fabric& job) {
      const auto mesh = std::make_shared<comm::MeshFabric>(share(job), mesh::Mesh(job.size(), {.tensor = 2}));
      Net net{NetOptions{}};
      fill_all(*net);
      const at::NoGradGuard no_grad;
      for (auto& each : net->named_parameters()) {
        if (frozen) each.value().set_requires_grad(false);
        if (each.key() == parameter && mesh->rank() % 2 == 1) each.value().view(-1)[1] += 1;
      }
      Options options;
      options.strategy = mesh::preset(strategy, ranks);
      options.mesh = mesh;
      Sharded sharded = shard_model(net, mesh->over(mesh::axes::state), options);
      const Batch batch = batch_of(net->options, 0, 0, 1);
      for (int step = 0; step < 2; ++step) net(batch.tokens, batch.targets);
    });
  } catch (const comm::Mismatch& mismatch) {
    text = mismatch.what();
  }
  return text;
}

TEST(SameUnsplit, OtherValuesOnATensorRankAreNamedAtTheFirstForward) {
  for (const char* strategy : {"NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"}) {
    for (const bool frozen : {false, true}) {
      EXPECT_EQ(said(2, strategy, "", frozen), "") << strategy;
      EXPECT_THAT(said(2, strategy, "block1.second", frozen),
                  AllOf(HasSubstr("\"block1.second\""), HasSubstr("the 2 tensor-parallel ranks")))
          << strategy << (frozen ? ", frozen" : "");
    }
  }
}

TEST(SameUnsplit, RanksThatHoldAllOfTheirStateCompareToo) {
  EXPECT_THAT(said(1, "FULL_SHARD", "embedding"), HasSubstr("\"embedding\""));
}

TEST(SameUnsplit, AModelOfWhichNothingIsSplitIsWarnedOf) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(said(1, "FULL_SHARD", ""), "");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("no parameter of this model is split among the 2 tensor-parallel ranks"));
}

}  // namespace
}  // namespace tesserae::shard::testing
