#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <string>
#include <vector>

#include "tests/train/train_job.h"

// Runs that end in the middle and go on, as users run them: real processes on Gloo, real signals.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

constexpr int64_t last = 24;

/// All tests share one reference run, which nothing disturbs: two replicas of two shards, dropout, accumulation.
class Resume : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("resume");
    job_->run("reference", with({"--set", "checkpoint.every_steps=6", "checkpoint.keep=0"}));
    ASSERT_THAT(job_->steps("reference"), ElementsAre(6, 12, 18, 24));
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static std::vector<std::string> with(std::vector<std::string> more) {
    more.insert(more.begin(), {"--nproc", "4", "--set", "hybrid_shard_degree=2"});
    return more;
  }
  /// Saves every 4 steps and continues.
  static std::vector<std::string> resuming(std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"--resume", "auto", "--set", "checkpoint.every_steps=4"});
    return with(std::move(more));
  }

  static void expect_like_the_reference(const std::string& run) {
    job_->expect_same_history(run, "reference", last);
    job_->expect_same_state(run, "reference", last);
  }

  static TrainJob* job_;
};

TrainJob* Resume::job_ = nullptr;

TEST_F(Resume, SigtermSavesAndExitsZeroAndAutoGoesOnBitwise) {
  Program first = job_->start("stopped", resuming());
  ASSERT_TRUE(first.wait_for("step 3/")) << first.errors;
  first.process().signal(SIGTERM);
  const auto exit = first.finish();
  ASSERT_TRUE(exit && exit->code == 0) << exit->text() << first.output << first.errors;
  EXPECT_THAT(first.output, HasSubstr("no checkpoint in "));
  EXPECT_THAT(first.output, HasSubstr("stopped: "));
  const size_t stopped = job_->metrics("stopped").size();
  ASSERT_LT(stopped, static_cast<size_t>(last)) << "it was over before the signal came";
  EXPECT_EQ(job_->steps("stopped").back(), static_cast<int64_t>(stopped));
  EXPECT_EQ(job_->summary("stopped")["stopped_by_signal"], SIGTERM);

  const std::string said = job_->run("stopped", resuming());
  EXPECT_THAT(said, HasSubstr(cat("resumed at step ", stopped, " from ")));
  expect_like_the_reference("stopped");
  EXPECT_EQ(job_->summary("stopped")["steps"], last);
  EXPECT_EQ(job_->summary("stopped")["resumed"]["step"], stopped);
  EXPECT_FALSE(os::files().exists(job_->path("stopped-2"))) << "it goes on in its own folder";
}

TEST_F(Resume, AKilledRankCostsOnlyTheStepsSinceTheLastSave) {
  Program first = job_->start("killed", resuming());
  ASSERT_TRUE(first.wait_for("saved step 8 ")) << first.output << first.errors;
  const std::vector<pid_t> ranks = children_of(first.process().id());
  ASSERT_THAT(ranks, SizeIs(4));
  ::kill(ranks[2], SIGKILL);
  const auto exit = first.finish();
  ASSERT_TRUE(exit && exit->code == 128 + SIGKILL) << first.errors;
  job_->run("killed", resuming());
  expect_like_the_reference("killed");
}

/// Ended by SIGKILL inside a save, at the points that matter most; tests/checkpoint goes through all of them.
class ResumeAfterCrash : public Resume, public testing::WithParamInterface<const char*> {};

TEST_P(ResumeAfterCrash, GoesOnFromACommittedCheckpoint) {
  const std::string run = cat("crashed-", std::string(GetParam()).substr(0, 4));
  Program first = job_->start(run, resuming(), {{"TESSERAE_CRASH_AT", GetParam()}});
  const auto exit = first.finish();
  ASSERT_TRUE(exit && exit->code == 128 + SIGKILL) << exit->text() << first.errors;
  const std::vector<int64_t> left = job_->steps(run);
  ASSERT_FALSE(left.empty());
  const std::string said = job_->run(run, resuming());
  EXPECT_THAT(said, HasSubstr(cat("resumed at step ", left.back())));
  expect_like_the_reference(run);
  for (const std::string& name : os::files().list(job_->path(run) + "/checkpoints")) {
    EXPECT_FALSE(checkpoint::is_stray(name)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Points, ResumeAfterCrash, testing::Values("data-synced@3#2", "renamed@0#3"),
                         [](const auto& info) { return std::string(info.param).substr(0, 4); });

TEST_F(Resume, ADamagedNewestCheckpointFallsBackToTheOneBefore) {
  job_->copy("reference", "damaged");
  job_->damage("damaged", 24, "rank-1.safetensors");
  os::files().remove(job_->path("damaged/checkpoints/step-18/manifest.json"));
  const std::string said = job_->run("damaged", resuming());
  const std::string refused = "step-24 cannot be loaded, taking the checkpoint before it: ";
  EXPECT_THAT(said, HasSubstr(refused));
  EXPECT_EQ(said.find(refused), said.rfind(refused)) << "nothing is loaded twice";
  EXPECT_THAT(said, HasSubstr("step-18 cannot be loaded, taking the checkpoint before it: "));
  EXPECT_THAT(said, HasSubstr("resumed at step 12 "));
  job_->expect_same_history("damaged", "reference", last);
}

TEST_F(Resume, ARunWhosePastCanNotBeReadDoesNotStartAnew) {
  job_->copy("reference", "lost");
  for (const int64_t step : {6, 12, 18, 24}) job_->damage("lost", step);
  const std::string before = os::files().read(job_->path("lost/metrics.jsonl"));
  Program program = job_->start("lost", resuming());
  EXPECT_EQ(program.finish()->code, 1);
  EXPECT_THAT(program.errors, HasSubstr("step-6/"));
  EXPECT_EQ(os::files().read(job_->path("lost/metrics.jsonl")), before) << "nothing is lost on top";
}

/// What has more state: fp16 with its loss scale, SGD with momentum, three different degrees, recomputed activations.
TEST_F(Resume, AnotherModelIsRefused) {
  const std::string from = job_->path("reference/checkpoints");
  const auto said = [&](const std::string& setting) {
    Program program = job_->start("other", with({"--resume", from, "--set", setting}));
    EXPECT_EQ(program.finish(seconds(100))->code, 1) << program.output;
    return program.errors;
  };
  EXPECT_THAT(said("model.layers=1"), HasSubstr("which this model does not have"));
  EXPECT_THAT(said("model.heads=4"), HasSubstr("was trained with model.heads 2, this job has 4"));
  const std::string longer =
      job_->run("longer", with({"--resume", from, "--set", "model.rope_base=20000", "train.steps=25"}));
  EXPECT_THAT(longer, HasSubstr("was trained with model.rope_base 10000"));
}

TEST_F(Resume, LossScalesMomentumAndUnequalDegreesGoOnBitwise) {
  const std::vector<std::string> arguments = {"--nproc",
                                              "4",
                                              "--set",
                                              "degrees={\"parameters\": 1, \"gradients\": 2, \"optimizer\": 4}",
                                              "precision=fp16",
                                              "optimizer.name=sgd",
                                              "model.checkpoint_activations=true",
                                              "train.steps=10",
                                              "checkpoint.every_steps=5",
                                              "checkpoint.keep=0"};
  job_->run("half", arguments);
  std::vector<std::string> again = arguments;
  again.insert(again.begin(), {"--resume", job_->path("half/checkpoints/step-5")});
  job_->run("half-again", again);
  job_->expect_same_history("half-again", "half", 10);
  job_->expect_same_state("half-again", "half", 10);
  const auto saved = checkpoint::Checkpoint::open(job_->path("half/checkpoints/step-5"));
  EXPECT_GT(saved.manifest().training.at("loss_scale").at("scale"), 0.0);
}

/// The same global batch on other ranks and layouts: the numbers differ by the order of sums only. Without dropout,
/// whose masks belong to ranks.
TEST_F(Resume, OtherLayoutsAndWorldSizesGoOnToRounding) {
  const std::vector<std::string> plain = {"--set", "model.dropout=0", "train.steps=12", "checkpoint.every_steps=6"};
  const auto run = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), plain.begin(), plain.end());
    return job_->run(name, more);
  };
  run("plain", with({}));
  const std::string from = job_->path("plain/checkpoints/step-6");
  const std::vector<std::vector<std::string>> others = {
      {"--nproc", "4", "--set", "degrees={\"parameters\": 1, \"gradients\": 2, \"optimizer\": 4}"},
      {"--nproc", "2", "--set", "train.batch_per_rank=4"},
      {"--nproc", "1", "--set", "train.batch_per_rank=16", "train.accumulate=1"},
  };
  const std::vector<config::Json> expected = job_->metrics("plain");
  double worst = 0;
  for (size_t i = 0; i < others.size(); ++i) {
    const std::string name = cat("other", i);
    std::vector<std::string> arguments = others[i];
    arguments.insert(arguments.begin(), {"--resume", from});
    const std::string said = run(name, arguments);
    EXPECT_THAT(said, HasSubstr("resumed at step 6 from " + from));
    const std::vector<config::Json> lines = job_->metrics(name);
    ASSERT_THAT(lines, SizeIs(12)) << "the first six are the other run's";
    for (size_t step = 0; step < lines.size(); ++step) {
      EXPECT_EQ(lines[step]["step"], step + 1);
      const double a = lines[step]["loss"], b = expected[step]["loss"];
      worst = std::max(worst, std::abs(a - b) / b);
    }
  }
  RecordProperty("worst_relative_difference", std::to_string(worst));
  EXPECT_LT(worst, 1e-4);
}

}  // namespace
}  // namespace tesserae::train
