#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <map>
#include <string>
#include <utility>
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

class LiveExperts : public ExpertJob {
 protected:
  /// A job of so many steps that it is there for whoever asks; the rate does not depend on how many they are.
  std::vector<std::string> with(const std::vector<std::string>& more) const {
    std::vector<std::string> settings = {
        "train.steps=100000",   "train.batch_per_rank=2",        "hybrid_shard_degree=2",
        "model.bias_rate=0.02", "checkpoint.every_steps=100000", "optimizer.schedule=constant"};
    settings.insert(settings.end(), more.begin(), more.end());
    return ranks(4, settings);
  }

  /// `tesserae dial --expert`: its exit status and all that it wrote.
  std::pair<int, std::string> dial(const std::string& run, const std::vector<std::string>& what) const {
    std::vector<std::string> words = {TESSERAE_PROGRAM, "dial", job_.path(run), "--wait", "100"};
    words.insert(words.end(), what.begin(), what.end());
    Program program(words);
    const auto exit = program.finish();
    return {exit ? exit->code : -1, program.output + program.errors};
  }

  void expect_shared_out(const std::string& run, int from, int to) const {
    const auto [status, text] = dial(run, {"--expert", std::to_string(to)});
    EXPECT_EQ(status, 0) << text;
    EXPECT_THAT(text, HasSubstr(cat(": experts over ", from, " -> ", to, " ranks, P=2 G=2 O=2, in ")));
  }

  /// It is told to end, and saves its last step, which is returned.
  int64_t stop(const std::string& run, Program& program) const {
    program.process().signal(SIGTERM);
    EXPECT_TRUE(program.finish(std::chrono::seconds(100))) << program.output << program.errors;
    return job_.metrics(run).back()["step"];
  }

  /// What `run` did between two of its checkpoints is what a job does that begins at the first with this degree.
  void expect_as_resumed(const std::string& run, int64_t first, int64_t second, int degree) const {
    const std::string other = cat(run, "-over-", degree);
    std::vector<std::string> arguments = with({cat("expert_parallel_degree=", degree), cat("train.steps=", second)});
    arguments.insert(arguments.begin(), {"--resume", job_.path(cat(run, "/checkpoints/step-", first))});
    job_.run(other, arguments);
    job_.expect_same_tensors(run, other, second);
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(other);
    for (int64_t step = first + 1; step <= second; ++step) {
      const auto i = static_cast<size_t>(step - 1);  // what came before the checkpoint is told of, too
      EXPECT_EQ(lines[i]["step"], step);
      EXPECT_EQ(expected[i]["step"], step);
      EXPECT_EQ(lines[i]["expert_parallel_degree"], degree);
      for (const char* key : {"loss", "grad_norm"}) EXPECT_EQ(lines[i][key], expected[i][key]) << key << " " << step;
    }
  }
};

TEST_F(LiveExperts, AreSharedOutOverOtherRanksWhileTheJobTrains) {
  Program program = job_.start("live", with({"expert_parallel_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const std::map<int, pid_t> processes = ranks_of(program);
  expect_shared_out("live", 2, 4);
  expect_shared_out("live", 4, 1);
  expect_shared_out("live", 1, 2);
  EXPECT_EQ(dial("live", {"--degree", "4"}).first, 0) << "the dial is as good as before";
  EXPECT_THAT(dial("live", {"--show"}).second, HasSubstr("P=4 G=4 O=4 on 4 ranks, experts over 2, "));
  EXPECT_EQ(ranks_of(program), processes);
  stop("live", program);

  const config::Json summary = job_.summary("live"), changes = summary["experts_shared_out"];
  ASSERT_EQ(changes.size(), 3u);
  EXPECT_EQ(summary["expert_parallel_degree"], 2);
  const int64_t first = changes[0]["step"], second = changes[1]["step"], third = changes[2]["step"];
  EXPECT_GT(changes[0]["seconds"], 0.0);
  EXPECT_EQ(job_.metrics("live").at(static_cast<size_t>(first - 1))["expert_parallel_degree"], 2);
  EXPECT_THAT(program.output, HasSubstr(cat("step ", first, ": experts are shared out over 4 ranks, before over 2")));
  EXPECT_THAT(os::files().read(job_.path("live/monitor/events.jsonl")),
              HasSubstr("experts are shared out over 1 ranks, before over 4"));
  EXPECT_EQ(job_.open("live", first).manifest().axes.expert, 2);
  EXPECT_EQ(job_.open("live", second).manifest().axes.expert, 4);
  expect_as_resumed("live", first, second, 4);
  expect_as_resumed("live", second, third, 1);
}

TEST_F(LiveExperts, WhatCanNotBeIsRefusedAndTrainingGoesOn) {
  Program program = job_.start("asked", with({"expert_parallel_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const auto [status, text] = dial("asked", {"--expert", "3"});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(text, HasSubstr("experts stay shared out over 2 ranks, not 3: 4 experts cannot be shared out by an "
                              "expert-parallel degree of 3; degrees that would do: 1, 2, 4"));
  EXPECT_THAT(dial("asked", {"--expert", "2"}).second, HasSubstr("experts over 2 -> 2 ranks"));
  EXPECT_EQ(dial("asked", {"--expert", "2", "--degree", "4"}).first, 2);
  const int64_t last = stop("asked", program);
  job_.run("undisturbed", with({"expert_parallel_degree=2", cat("train.steps=", last)}));
  job_.expect_same_history("asked", "undisturbed", static_cast<size_t>(last));
  EXPECT_FALSE(job_.summary("asked").contains("experts_shared_out"));
}

// A rank that is lost later: its new process hears over how many ranks experts are shared out.
TEST_F(LiveExperts, ALostRankIsReplacedInTheNewMesh) {
  Program program = job_.start("lost", with({"expert_parallel_degree=2", "recovery.replacements=1"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  expect_shared_out("lost", 2, 1);
  ::kill(ranks_of(program).at(1), SIGKILL);
  ASSERT_TRUE(program.wait_for("a new process has the place of rank 1: on from step ")) << program.errors;
  const int64_t last = stop("lost", program);
  const config::Json summary = job_.summary("lost");
  EXPECT_EQ(summary["recoveries"].size(), 1u);
  EXPECT_EQ(summary["expert_parallel_degree"], 1);
  ASSERT_EQ(summary["experts_shared_out"].size(), 1u);
  const int64_t step = summary["experts_shared_out"][0]["step"];
  expect_as_resumed("lost", step, last, 1);
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
