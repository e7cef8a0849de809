#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "tests/train/train_job.h"

// When `tesserae train` saves, where it writes, and what happens when it cannot.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

class Checkpoints : public testing::Test {
 protected:
  using Arguments = std::vector<std::string>;
  const TrainJob job_{"checkpoints"};
};

TEST_F(Checkpoints, AreOffUnlessAskedFor) {
  job_.run("run", {"--set", "train.steps=2"});
  EXPECT_FALSE(os::files().exists(job_.path("run/checkpoints")));
  EXPECT_FALSE(job_.summary("run").contains("checkpoints"));
}

TEST_F(Checkpoints, TheLastStepIsSavedAndOldOnesGo) {
  const std::string said =
      job_.run("run", {"--set", "train.steps=23", "checkpoint.every_steps=5", "checkpoint.keep=2"});
  EXPECT_THAT(job_.steps("run"), ElementsAre(20, 23));
  EXPECT_THAT(said, HasSubstr("saved step 23 in " + job_.path("run/checkpoints")));
  EXPECT_EQ(job_.summary("run")["checkpoints"]["saved"], 5);
  EXPECT_EQ(job_.summary("run")["checkpoints"]["failed"], 0);
}

TEST_F(Checkpoints, AreSavedByTime) {
  job_.run("run", {"--set", "train.steps=200", "checkpoint.every_minutes=0.002", "checkpoint.async=false"});
  const int saved = job_.summary("run")["checkpoints"]["saved"];
  EXPECT_GT(saved, 2);
  EXPECT_LT(saved, 150) << "not after every step";
}

TEST_F(Checkpoints, Sigusr1AndCtrlCSaveToo) {
  for (const int number : {SIGUSR1, SIGINT}) {
    const std::string run = cat("run", number);
    Program program = job_.start(
        run, {"--nproc", "2", "--set", "train.steps=100000", "checkpoint.folder=" + job_.path(run) + "/checkpoints"});
    ASSERT_TRUE(program.wait_for("step 3/")) << program.errors;
    program.process().signal(number);
    const auto exit = program.finish();
    ASSERT_TRUE(exit && exit->code == 0) << exit->text() << program.errors;
    EXPECT_THAT(job_.steps(run), ElementsAre(job_.summary(run)["steps"].get<int64_t>()));
    EXPECT_EQ(job_.summary(run)["stopped_by_signal"], number == SIGINT ? SIGTERM : number);
  }
}

/// A step that takes hours: only a second signal can end it.
TEST_F(Checkpoints, ASecondSigtermEndsTheProcessAtOnce) {
  Program program = job_.start("run", {"--set", "train.accumulate=10000000", "checkpoint.every_steps=1"});
  ASSERT_TRUE(program.wait_for("run folder")) << program.errors;
  program.process().signal(SIGTERM);
  program.process().signal(SIGTERM);  // right after: the same request, passed on by two parents
  os::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_FALSE(program.process().poll()) << "it was to finish its step";
  const os::TimePoint begin = os::now();
  program.process().signal(SIGTERM);
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGTERM);
  EXPECT_LT(os::now() - begin, seconds(10));
}

/// Something takes the folder's place while the job runs, as a storage that goes away does.
class FailedSave : public Checkpoints {
 protected:
  Program start(const std::string& on_error) {
    Program program = job_.start("run", {"--nproc", "2", "--set", "train.steps=100000", "checkpoint.every_steps=20",
                                         "checkpoint.keep=0", "checkpoint.on_error=" + on_error});
    EXPECT_TRUE(program.wait_for("saved step 20 ")) << program.output << program.errors;
    os::files().rename(folder_, folder_ + "-away");
    os::files().write(folder_, "no directory");
    broken_ = os::now();
    return program;
  }
  const std::string folder_ = job_.path("run/checkpoints");
  os::TimePoint broken_;
};

TEST_F(FailedSave, StopsTheRunAndLeavesOlderCheckpoints) {
  Program program = start("stop");
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 1);
  const double took = std::chrono::duration<double>(os::now() - broken_).count();
  RecordProperty("seconds", std::to_string(took));
  EXPECT_LT(took, 50);  // 5 s are promised from the save on
  EXPECT_THAT(program.errors, AllOf(HasSubstr("was not saved, older checkpoints are untouched: rank "),
                                    HasSubstr("run/checkpoints"), HasSubstr("exited with code 1")));
  os::files().remove(folder_);
  os::files().rename(folder_ + "-away", folder_);
  EXPECT_EQ(job_.steps("run").front(), 20);
}

TEST_F(FailedSave, LetsTheRunGoOnIfItIsToldTo) {
  Program program = start("continue");
  ASSERT_TRUE(program.wait_for("training goes on")) << program.output << program.errors;
  os::files().remove(folder_);
  os::files().rename(folder_ + "-away", folder_);
  program.output.clear();
  ASSERT_TRUE(program.wait_for("saved step ")) << program.output << program.errors;
  program.process().signal(SIGTERM);
  const auto exit = program.finish();
  ASSERT_TRUE(exit && exit->code == 0) << program.errors;
  EXPECT_GE(job_.summary("run")["checkpoints"]["failed"], 1);
}

TEST_F(FailedSave, AtTheEndIsAnErrorAlsoThen) {
  os::files().write(job_.path("file"), "");
  Program program = job_.start("run", {"--set", "train.steps=3", "checkpoint.on_error=continue",
                                       "checkpoint.folder=" + job_.path("file/checkpoints")});
  EXPECT_EQ(program.finish()->code, 1);
  EXPECT_THAT(program.errors, HasSubstr("step 3 was not saved"));
  EXPECT_EQ(job_.summary("run")["steps"], 3) << "what was measured is there";
}

class RunFolders : public Checkpoints {
 protected:
  std::string run(const std::string& run, int steps, const std::string& resume) {
    return job_.run(run, {"--resume", resume, "--set", cat("train.steps=", steps), "checkpoint.every_steps=5"});
  }
};

TEST_F(RunFolders, NeverTakesAFolderOfItsOwn) {
  run("run", 5, "never");
  run("run", 6, "never");
  EXPECT_THAT(job_.steps("run"), ElementsAre(5));
  EXPECT_THAT(job_.steps("run-2"), ElementsAre(5, 6));
}

TEST_F(RunFolders, AutoStartsARunThatHasNoPastAndThenHasNothingToDo) {
  EXPECT_THAT(run("run", 5, "auto"), HasSubstr("starting from step 0"));
  const std::string before = os::files().read(job_.path("run/metrics.jsonl"));
  const std::string said = run("run", 5, "auto");
  EXPECT_THAT(said, AllOf(HasSubstr("resumed at step 5"), HasSubstr("train.steps is 5: there is nothing to do")));
  EXPECT_EQ(os::files().read(job_.path("run/metrics.jsonl")), before);
  EXPECT_EQ(job_.summary("run")["steps"], 5);
  EXPECT_THAT(job_.steps("run"), ElementsAre(5));
  run("run", 8, "auto");
  EXPECT_THAT(job_.metrics("run"), SizeIs(8));
}

TEST_F(RunFolders, AutoKeepsWhatAnAttemptWithoutACheckpointMeasured) {
  job_.run("run", {"--set", "train.steps=3"});
  const std::string before = os::files().read(job_.path("run/metrics.jsonl"));
  run("run", 5, "auto");
  EXPECT_THAT(job_.metrics("run"), SizeIs(5));
  EXPECT_EQ(os::files().read(job_.path("run/metrics-1.jsonl")), before);
}

TEST_F(RunFolders, ANamedCheckpointThatIsNotTheNewestBeginsAnotherRun) {
  run("run", 12, "never");
  const std::string before = os::files().read(job_.path("run/metrics.jsonl"));
  run("run", 12, job_.path("run/checkpoints/step-5"));
  EXPECT_EQ(os::files().read(job_.path("run/metrics.jsonl")), before);
  EXPECT_THAT(job_.metrics("run-2"), SizeIs(12)) << "with the history up to step 5";
  EXPECT_THAT(job_.steps("run-2"), ElementsAre(10, 12));
  job_.expect_same_history("run-2", "run", 12);

  run("run", 14, job_.path("run"));
  EXPECT_THAT(job_.metrics("run"), SizeIs(14)) << "the newest is continued where it is";
  EXPECT_FALSE(os::files().exists(job_.path("run-3")));
}

TEST_F(RunFolders, OtherDataStartFromTheirBeginning) {
  run("run", 5, "never");
  const std::string said = job_.run(
      "other", {"--resume", job_.path("run/checkpoints"), "--set", "train.steps=6", "data.sequence_length=16"});
  EXPECT_THAT(said, AllOf(HasSubstr("was trained on other data"), HasSubstr("resumed at step 5")));
}

TEST_F(RunFolders, AnotherModelIsRefused) {
  run("run", 5, "never");
  Program program = job_.start("other", {"--resume", job_.path("run/checkpoints"), "--set", "model.dimension=64"});
  EXPECT_EQ(program.finish()->code, 1);
  EXPECT_THAT(program.errors, HasSubstr("has shape"));
}

}  // namespace
}  // namespace tesserae::train
