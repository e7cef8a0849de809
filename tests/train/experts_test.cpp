#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/mesh_job.h"

// `tesserae train` with mixtures of experts: the numbers of a run do not depend on how many ranks share them out.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ExpertJob : public MeshJob {
 protected:
  ExpertJob()
      : MeshJob("experts", {"model.experts=4", "model.feed_forward=32", "model.shared_experts=1",
                            "checkpoint.every_steps=12", "checkpoint.keep=0"}) {}
};

TEST_F(ExpertJob, SharedOutExpertsGiveTheSameLosses) {
  job_.run("whole", ranks(2, {"hybrid_shard_degree=2", "train.batch_per_rank=4"}));
  const std::string screen =
      job_.run("shared-out", ranks(4, {"expert_parallel_degree=2", "hybrid_shard_degree=2", "train.batch_per_rank=2"}));
  expect_same_losses("shared-out", "whole");
  EXPECT_THAT(screen, AllOf(HasSubstr("on 4 ranks"), HasSubstr("experts shared out over 2, P=2 G=2 O=2")));
  EXPECT_EQ(job_.summary("shared-out")["expert_parallel_degree"], 2);

  // From checkpoints of other meshes, beside the other axes, while the dial turns; and back on fewer ranks.
  expect_continues(
      "turned", "whole", 4,
      {"expert_parallel_degree=4", "train.batch_per_rank=2",
       R"(dial.schedule=[{"step": 15, "hybrid_shard_degree": 1}, {"step": 18, "hybrid_shard_degree": 4}])"});
  expect_continues("with-tensor", "shared-out", 4,
                   {"expert_parallel_degree=2", "tensor_parallel_degree=2", "train.batch_per_rank=4",
                    "model.checkpoint_activations=true"});
  expect_continues(
      "with-context", "shared-out", 4,
      {"expert_parallel_degree=4", "context_parallel_degree=2", "train.batch_per_rank=4", "hybrid_shard_degree=4"});
  expect_continues("alone", "shared-out", 1, {"train.batch_per_rank=8"});

  for (const char* run : {"whole", "shared-out"}) {
    const config::Json line = job_.metrics(run).back();
    EXPECT_GE(line["expert_imbalance"].get<double>(), 1.0);
    EXPECT_EQ(line["expert_dropped"].get<double>(), 0.0);
    EXPECT_EQ(line["expert_bytes"].get<int64_t>() > 0, run == std::string("shared-out"));
  }
}

TEST_F(ExpertJob, BiasesAndCapacitiesAreOfTheWholeBatch) {
  const std::vector<std::string> options{"model.bias_rate=0.02", "model.balance_loss=0", "model.capacity_factor=1.1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), options.begin(), options.end());
    return more;
  };
  job_.run("biased", ranks(1, with({"train.batch_per_rank=8"})));
  EXPECT_GT(job_.metrics("biased").front()["expert_dropped"].get<double>(), 0.0);
  const std::vector<std::string> shared_out = with({"expert_parallel_degree=2", "train.batch_per_rank=2"});
  expect_continues("resumed", "biased", 4, shared_out, "biased");
}

TEST_F(ExpertJob, WhatCanNotBeIsRefused) {
  EXPECT_THAT(
      refused(4, {"expert_parallel_degree=3"}),
      HasSubstr("expert_parallel_degree: an expert-parallel degree of 3 does not divide the 4 ranks of the job"));
  EXPECT_THAT(refused(4, {"expert_parallel_degree=4", "model.experts=6"}),
              HasSubstr("expert_parallel_degree: 6 experts cannot be shared out by an expert-parallel degree of 4; "
                        "degrees that would do: 1, 2, 3, 6"));
  EXPECT_THAT(refused(2, {"expert_parallel_degree=2", "model.experts=0"}), HasSubstr("set model.experts"));
  EXPECT_THAT(refused(2, {"model.experts_per_token=5"}), HasSubstr("model: experts_per_token is 5"));
}

TEST_F(ExpertJob, TheDegreesAreChosenForExpertsToo) {
  job_.run("whole", ranks(1, {"train.batch_per_rank=8"}));
  const std::string screen = job_.run(
      "chosen", ranks(4, {R"(hybrid_shard_degree="auto")", "expert_parallel_degree=2", "train.batch_per_rank=2"}));
  EXPECT_THAT(screen, HasSubstr("estimated to be fastest of what fits"));
  expect_same_losses("chosen", "whole");
}

}  // namespace
}  // namespace tesserae::train
