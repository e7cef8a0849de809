#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/train_job.h"

// `tesserae train` with mixtures of experts: the numbers of a run do not depend on how many ranks share them out.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ExpertJob : public testing::Test {
 protected:
  static std::vector<std::string> mixture(int count, const std::vector<std::string>& more) {
    std::vector<std::string> all = {"--nproc", std::to_string(count),       "--set", "model.heads=4",
                                    "--set",   "model.dropout=0",           "--set", "model.experts=4",
                                    "--set",   "model.feed_forward=32",     "--set", "model.shared_experts=1",
                                    "--set",   "checkpoint.every_steps=12", "--set", "checkpoint.keep=0"};
    for (const std::string& assignment : more) all.insert(all.end(), {"--set", assignment});
    return all;
  }

  void expect_same_losses(const std::string& run, const std::string& reference) const {
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(reference);
    ASSERT_GE(lines.size(), 12u);
    for (size_t i = 1; i <= std::min(lines.size(), expected.size()); ++i) {
      const config::Json &line = lines[lines.size() - i], &wanted = expected[expected.size() - i];
      const double loss = wanted["loss"], norm = wanted["grad_norm"];
      EXPECT_NEAR(line["loss"].get<double>(), loss, 1e-4 * loss) << run << ", " << i << " to go";
      EXPECT_NEAR(line["grad_norm"].get<double>(), norm, 1e-3 * norm) << run << ", " << i << " to go";
    }
    EXPECT_NEAR(lines.back()["val_loss"].get<double>(), expected.back()["val_loss"].get<double>(), 1e-3);
  }

  const TrainJob job_{"experts"};
};

TEST_F(ExpertJob, SharedOutExpertsGiveTheSameLosses) {
  job_.run("whole", mixture(2, {"hybrid_shard_degree=2", "train.batch_per_rank=4"}));
  const std::string screen = job_.run(
      "shared-out", mixture(4, {"expert_parallel_degree=2", "hybrid_shard_degree=2", "train.batch_per_rank=2"}));
  expect_same_losses("shared-out", "whole");
  EXPECT_THAT(screen, AllOf(HasSubstr("on 4 ranks"), HasSubstr("experts shared out over 2, P=2 G=2 O=2")));
  EXPECT_EQ(job_.summary("shared-out")["expert_parallel_degree"], 2);

  // From checkpoints of other meshes, beside the other axes, while the dial turns; and back on fewer ranks.
  const auto continued = [&](const std::string& run, const std::string& from, int count,
                             const std::vector<std::string>& more) {
    std::vector<std::string> arguments = mixture(count, more);
    arguments.insert(arguments.begin(), {"--resume", job_.path(from + "/checkpoints/step-12")});
    EXPECT_THAT(job_.run(run, arguments), HasSubstr("resumed at step 12 "));
    expect_same_losses(run, "whole");
  };
  continued("turned", "whole", 4,
            {"expert_parallel_degree=4", "train.batch_per_rank=2",
             R"(dial.schedule=[{"step": 15, "hybrid_shard_degree": 1}, {"step": 18, "hybrid_shard_degree": 4}])"});
  continued("with-tensor", "shared-out", 4,
            {"expert_parallel_degree=2", "tensor_parallel_degree=2", "train.batch_per_rank=4",
             "model.checkpoint_activations=true"});
  continued(
      "with-context", "shared-out", 4,
      {"expert_parallel_degree=4", "context_parallel_degree=2", "train.batch_per_rank=4", "hybrid_shard_degree=4"});
  continued("alone", "shared-out", 1, {"train.batch_per_rank=8"});

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
  job_.run("biased", mixture(1, with({"train.batch_per_rank=8"})));
  EXPECT_GT(job_.metrics("biased").front()["expert_dropped"].get<double>(), 0.0);
  std::vector<std::string> arguments = mixture(4, with({"expert_parallel_degree=2", "train.batch_per_rank=2"}));
  arguments.insert(arguments.begin(), {"--resume", job_.path("biased/checkpoints/step-12")});
  job_.run("resumed", arguments);
  expect_same_losses("resumed", "biased");
}

TEST_F(ExpertJob, WhatCanNotBeIsRefused) {
  const auto refused = [&](int count, const std::vector<std::string>& more) {
    Program program = job_.start("refused", mixture(count, more));
    const auto exit = program.finish(std::chrono::seconds(100));
    EXPECT_TRUE(exit && !exit->success());
    return program.output + program.errors;
  };
  EXPECT_THAT(
      refused(4, {"expert_parallel_degree=3"}),
      HasSubstr("expert_parallel_degree: an expert-parallel degree of 3 does not divide the 4 ranks of the job"));
  EXPECT_THAT(refused(4, {"expert_parallel_degree=4", "model.experts=6"}),
              HasSubstr("expert_parallel_degree: 6 experts cannot be shared out by an expert-parallel degree of 4; "
                        "degrees that would do: 1, 2, 3, 6"));
  EXPECT_THAT(refused(2, {"expert_parallel_degree=2", "model.experts=0"}), HasSubstr("set model.experts"));
  EXPECT_THAT(refused(2, {"model.experts_per_token=5"}), HasSubstr("model: experts_per_token is 5"));
  EXPECT_THAT(refused(2, {R"(hybrid_shard_degree="auto")"}), HasSubstr("mixture of experts"));
}

}  // namespace
}  // namespace tesserae::train
