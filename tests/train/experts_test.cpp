#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/checkpoint/weights.h"
#include "tests/train/mesh_job.h"

// `tesserae train` with mixtures of experts: the numbers of a run do not depend on how many ranks share them out.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

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

TEST_F(ExpertJob, BiasesOfRoutersAreWeights) {
  const std::string live = job_.path("live"), again = job_.path("again");
  job_.run("biased", ranks(2, {"model.bias_rate=0.02", "train.steps=11", "checkpoint.every_steps=11",
                               "run.weights_folder=" + live}));
  Program program({TESSERAE_PROGRAM, "convert", live, again});
  ASSERT_TRUE(program.finish()->success()) << program.errors;
  std::vector<std::string> arguments =
      ranks(2, {"model.bias_rate=0.000001", "train.steps=1", "optimizer.lr=0", "checkpoint.every_steps=1"});
  arguments.insert(arguments.begin(), {"--resume", again});
  job_.run("from-weights", arguments);

  const std::string name = "blocks.0.feed_forward.router.bias";
  const auto biases = [](const std::string& bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  const auto stored = [&](const std::string& checkpoint) {
    return biases(checkpoint::Checkpoint::open(job_.path(checkpoint)).read("buffer/" + name));
  };
  const std::vector<float> expected = stored("biased/checkpoints/step-11");
  EXPECT_THAT(expected, testing::Contains(testing::Gt(0.01F)));
  const auto files = checkpoint::WeightFiles::open(live);
  std::string written(expected.size() * sizeof(float), '\0');
  files.read(name, 0, written);
  EXPECT_EQ(biases(written), expected);
  EXPECT_THAT(stored("from-weights/checkpoints/step-1"), testing::Pointwise(testing::FloatNear(1e-5F), expected));
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

  /// What `run` did after step `first` is what a job does that begins there, from the last checkpoint of `from` (empty:
  /// at the beginning), with this degree. Returns that job, which ended at step `second`.
  std::string expect_as_alone(const std::string& run, const std::string& from, int64_t first, int64_t second,
                              int degree, std::vector<std::string> more = {}) const {
    const std::string other = cat(run, "-", first, "-over-", degree);
    more.insert(more.end(), {cat("expert_parallel_degree=", degree), cat("train.steps=", second)});
    std::vector<std::string> arguments = with(more);
    if (!from.empty()) arguments.insert(arguments.begin(), {"--resume", job_.path(cat(from, "/checkpoints"))});
    job_.run(other, arguments);
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(other);
    for (int64_t step = first + 1; step <= second; ++step) {
      const config::Json& line = lines.at(static_cast<size_t>(step - 1));
      const config::Json& wanted = expected.at(expected.size() - 1 - static_cast<size_t>(second - step));
      EXPECT_EQ(line["step"], step);
      EXPECT_EQ(wanted["step"], step);
      EXPECT_EQ(line["expert_parallel_degree"], degree);
      for (const char* key : {"loss", "grad_norm"}) EXPECT_EQ(line[key], wanted[key]) << key << " " << step;
    }
    return other;
  }

  /// The step after which experts were shared out over so many ranks.
  int64_t last_step_before(const std::string& run, int degree) const {
    for (const config::Json& line : job_.metrics(run)) {
      if (line["expert_parallel_degree"] == degree) return line["step"].get<int64_t>() - 1;
    }
    ADD_FAILURE() << "never over " << degree << " ranks";
    return 0;
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
  EXPECT_THAT(job_.steps("live"), SizeIs(1)) << "the last; nothing was saved for a change";
  const std::string before = expect_as_alone("live", "", 0, first, 2);
  const std::string between = expect_as_alone("live", before, first, second, 4);
  expect_as_alone("live", between, second, third, 1);
}

/// Ranks whose connections have no memory in common, as those of several hosts: through a checkpoint.
TEST_F(LiveExperts, WhereRanksShareNoMemoryACheckpointIsTheWay) {
  Program program = job_.start("saved", with({"expert_parallel_degree=2", "run.backend=gloo"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  // One that cannot be saved.
  const std::string folder = job_.path("saved/checkpoints"), aside = job_.path("aside");
  if (std::filesystem::exists(folder)) std::filesystem::rename(folder, aside);
  os::files().write(folder, "no folder");
  const auto [status, text] = dial("saved", {"--expert", "4"});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(text, AllOf(HasSubstr("experts stay shared out over 2 ranks, not 4: "), HasSubstr(" was not saved")));
  os::files().remove(folder);
  if (std::filesystem::exists(aside)) std::filesystem::rename(aside, folder);
  expect_shared_out("saved", 2, 4);
  const int64_t last = stop("saved", program), step = job_.summary("saved")["experts_shared_out"][0]["step"];
  EXPECT_EQ(job_.open("saved", step).manifest().axes.expert, 2);
  const std::string before = expect_as_alone("saved", "", 0, step, 2);
  job_.expect_same_tensors("saved", before, step);
  job_.expect_same_tensors("saved", expect_as_alone("saved", before, step, last, 4), last);
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
  const std::string before = expect_as_alone("lost", "", 0, step, 2);
  job_.expect_same_tensors("lost", expect_as_alone("lost", before, step, last, 1), last);
}

TEST_F(LiveExperts, BiasesComeBackFromSnapshotsInMemory) {
  const std::vector<std::string> memory = {"checkpoint.memory_every_steps=1", "hybrid_shard_degree=4"};
  const auto job = [&](std::vector<std::string> more) {
    more.insert(more.end(), memory.begin(), memory.end());
    return with(more);
  };
  Program program = job_.start("snapshots", job({"expert_parallel_degree=2", "recovery.replacements=1"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  ::kill(ranks_of(program).at(1), SIGKILL);
  ASSERT_TRUE(program.wait_for("a new process has the place of rank 1: on from step ")) << program.errors;
  EXPECT_EQ(dial("snapshots", {"--show"}).first, 0) << "it trains";
  ::kill(ranks_of(program).at(2), SIGKILL);
  const auto exit = program.finish();
  ASSERT_TRUE(exit && !exit->success());
  const auto reached = static_cast<int64_t>(job_.metrics("snapshots").size());

  // No checkpoint, and another E: from what is left in memory.
  std::vector<std::string> again = job({"expert_parallel_degree=4", cat("train.steps=", reached + 4)});
  again.insert(again.begin(), {"--resume", "auto"});
  EXPECT_THAT(job_.run("snapshots", again), HasSubstr("resumed at step "));
  const int64_t step = last_step_before("snapshots", 4);
  EXPECT_GE(step, reached - 1);
  const std::string before = expect_as_alone("snapshots", "", 0, step, 2, memory);
  job_.expect_same_tensors("snapshots", expect_as_alone("snapshots", before, step, reached + 4, 4, memory),
                           reached + 4);
}

/// Killed while the state is handed over, when all have it, and when the launcher's store has the new degree.
struct Death {
  const char* name;
  const char* at;
  int rank;
  bool replicas;  // of what it held
  int degree;     // afterwards
};

/// Rank 0 has left the second degree in the launcher's store, and nobody else has heard of it: the first one, which
/// all remember, does not count any more.
TEST_F(LiveExperts, ARankIsKilledInTheSecondOfTwoChanges) {
  Program program =
      job_.start("second", with({"expert_parallel_degree=2", "recovery.replacements=1", "hybrid_shard_degree=1"}),
                 {{"TESSERAE_CRASH_AT", "degree-left@0#2"}});
  ASSERT_TRUE(program.wait_for("step 10/")) << program.output << program.errors;
  EXPECT_EQ(dial("second", {"--expert", "4"}).first, 0);
  EXPECT_EQ(dial("second", {"--expert", "1"}).first, 1);
  ASSERT_TRUE(program.wait_for("a new process has the place of rank 0: on from step ")) << program.errors;
  stop("second", program);
  EXPECT_EQ(job_.summary("second")["expert_parallel_degree"], 1);
  EXPECT_EQ(program.output.find("steps back"), std::string::npos) << program.output;
}

class KilledWhileSharingOut : public LiveExperts, public testing::WithParamInterface<Death> {};

TEST_P(KilledWhileSharingOut, TheJobGoesOn) {
  const Death& death = GetParam();
  const std::string run = cat("killed-", death.name);
  const std::string degree = cat("hybrid_shard_degree=", death.replicas ? 1 : 4);
  Program program =
      job_.start(run, with({"expert_parallel_degree=2", "recovery.replacements=1", "checkpoint.every_steps=4", degree}),
                 {{"TESSERAE_CRASH_AT", cat(death.at, "@", death.rank)}});
  ASSERT_TRUE(program.wait_for("step 10/")) << program.output << program.errors;
  EXPECT_EQ(dial(run, {"--expert", "1"}).first, 1);
  ASSERT_TRUE(program.wait_for(cat("a new process has the place of rank ", death.rank, ": on from step ")))
      << program.output << program.errors;
  const int64_t last = stop(run, program);
  const config::Json summary = job_.summary(run);
  EXPECT_EQ(summary["recoveries"].size(), 1u);
  EXPECT_EQ(summary["expert_parallel_degree"], death.degree);
  EXPECT_EQ(program.output.find("steps back") == std::string::npos, death.replicas) << program.output;
  const int64_t step = death.degree == 2 ? last : last_step_before(run, death.degree);
  const std::string other = cat(run, "-alone");
  job_.run(other, with({"expert_parallel_degree=2", degree, cat("train.steps=", step)}));
  const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(other);
  ASSERT_EQ(lines.size(), static_cast<size_t>(last));
  for (size_t i = 0; i < expected.size(); ++i) {
    for (const char* key : {"step", "loss", "grad_norm"}) EXPECT_EQ(lines[i][key], expected[i][key]) << key << " " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, KilledWhileSharingOut,
                         testing::Values(Death{"OnTheWay", "handing-over", 1, true, 2},
                                         Death{"OnTheWayWithoutReplicas", "handing-over", 2, false, 2},
                                         Death{"WhenAllHaveIt", "handed-over", 0, true, 2},
                                         Death{"WhenTheDegreeIsLeft", "degree-left", 0, true, 1},
                                         Death{"WhenAnotherHasLeftTheDegree", "degree-left", 3, true, 1}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(LiveExperts, WithoutReplacementsALossWhileTheyAreSharedOutEndsTheJob) {
  const std::vector<std::string> settings = with({"expert_parallel_degree=2", "checkpoint.every_steps=4"});
  Program program = job_.start("ended", settings, {{"TESSERAE_CRASH_AT", "handing-over@1"}});
  ASSERT_TRUE(program.wait_for("step 10/")) << program.output << program.errors;
  EXPECT_EQ(dial("ended", {"--expert", "4"}).first, 1);
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGKILL);
  EXPECT_THAT(program.errors, HasSubstr("rank 1 of 4 was killed by signal 9 (Killed); the other ranks were ended"));
  const int64_t newest = job_.steps("ended").back();
  std::vector<std::string> again = with({"expert_parallel_degree=4", cat("train.steps=", newest + 4)});
  again.insert(again.begin(), {"--resume", "auto"});
  EXPECT_THAT(job_.run("ended", again), HasSubstr(cat("resumed at step ", newest)));
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
