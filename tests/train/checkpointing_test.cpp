#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/promise.h"
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

/// A cluster manager warns, and later says that it is time: the save must not pay for that.
TEST_F(Checkpoints, SigtermAfterTheWarningIsTheFirstDemand) {
  Program program = job_.start("run", {"--set", "train.accumulate=10000000", "checkpoint.every_steps=1"});
  ASSERT_TRUE(program.wait_for("run folder")) << program.errors;
  program.process().signal(SIGUSR1);
  os::sleep_for(std::chrono::milliseconds(1500));
  program.process().signal(SIGTERM);
  os::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_FALSE(program.process().poll()) << "it was to finish its step";
  program.process().signal(SIGTERM);
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGUSR1) << "the first signal names the reason";
}

/// No file may grow any more, those of a checkpoint and the metrics; as where a disk is full.
TEST_F(Checkpoints, ADiskThatIsFullForAWhileCostsNoStep) {
  const auto before = std::signal(SIGXFSZ, SIG_IGN);  // for the ranks, who would be killed before they see the error
  Program program =
      job_.start("run", {"--nproc", "2", "--set", "train.steps=100000", "run.backend=gloo", "checkpoint.every_steps=20",
                         "checkpoint.keep=0", "checkpoint.on_error=continue"});
  std::signal(SIGXFSZ, before);
  ASSERT_TRUE(program.wait_for("saved step 20 ")) << program.output << program.errors;
  const auto let_files_have = [&program](rlim_t bytes) {
    const rlimit limit{bytes, RLIM_INFINITY};
    for (const auto& [rank, process] : ranks_of(program)) {
      EXPECT_EQ(::prlimit(process, RLIMIT_FSIZE, &limit, nullptr), 0) << rank;
    }
  };
  let_files_have(4096);
  ASSERT_TRUE(program.wait_for("training goes on")) << program.output << program.errors;
  EXPECT_THAT(program.errors,
              AllOf(HasSubstr("was not saved, older checkpoints are untouched: rank "), HasSubstr("File too large")));
  const std::vector<int64_t> saved = job_.steps("run");
  for (const int64_t step : saved) job_.open("run", step);
  let_files_have(RLIM_INFINITY);
  program.output.clear();
  ASSERT_TRUE(program.wait_for("saved step ")) << program.output << program.errors;
  program.process().signal(SIGTERM);
  const auto exit = program.finish();
  ASSERT_TRUE(exit && exit->success()) << program.output << program.errors;
  EXPECT_GT(job_.steps("run").back(), saved.back());
  // What there was no room for came later, after the part of a line that there was room for.
  std::istringstream metrics(os::files().read(job_.path("run") + "/metrics.jsonl"));
  int64_t step = 0;
  for (std::string line; std::getline(metrics, line);) {
    const config::Json record = config::Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (record.is_discarded()) continue;
    EXPECT_EQ(record["step"], ++step);
  }
  EXPECT_EQ(step, job_.steps("run").back());
}

/// Something takes the folder's place while the job runs, as a storage that goes away does.
class FailedSave : public Checkpoints {
 protected:
  Program start(const std::string& on_error, int ranks = 2) {
    Program program =
        job_.start("run", {"--nproc", std::to_string(ranks), "--set", "train.steps=100000", "checkpoint.every_steps=20",
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
  std::vector<double> took;
  for (int i = 0; i < 5; ++i) {
    os::files().remove_all(job_.path("run"));
    Program program = start("stop");
    const auto exit = program.finish();
    took.push_back(std::chrono::duration<double>(os::now() - broken_).count());  // the next save is soon after
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->code, 1);
    EXPECT_THAT(program.errors, AllOf(HasSubstr("was not saved, older checkpoints are untouched: rank "),
                                      HasSubstr("run/checkpoints"), HasSubstr("exited with code 1")));
    os::files().remove(folder_);
    os::files().rename(folder_ + "-away", folder_);
    EXPECT_EQ(job_.steps("run").front(), 20);
  }
  expect_promise(took, 5);
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
  Program program = start("continue", 1);
  ASSERT_TRUE(program.wait_for("training goes on")) << program.output << program.errors;
  program.process().signal(SIGTERM);
  EXPECT_EQ(program.finish()->code, 1);
  const int64_t last = job_.summary("run")["steps"];  // what was measured is there
  EXPECT_GE(last, 20);
  EXPECT_THAT(program.errors, HasSubstr(cat("step ", last, " was not saved")));
}

TEST_F(Checkpoints, AFolderThatCannotBeIsAnErrorBeforeTheFirstStep) {
  os::files().write(job_.path("file"), "");
  Program program = job_.start("run", {"--set", "train.steps=3", "checkpoint.every_steps=1",
                                       "checkpoint.folder=" + job_.path("file/checkpoints")});
  EXPECT_EQ(program.finish()->code, 1);
  EXPECT_THAT(program.errors, AllOf(HasSubstr("rank 0 cannot claim its folders"), HasSubstr("file")));
  EXPECT_FALSE(os::files().exists(job_.path("run/metrics.jsonl")));
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

TEST_F(RunFolders, ASecondRunInALiveFolderIsRefusedAndTouchesNothing) {
  const Arguments settings = {
      "--resume", "auto", "--set", "train.steps=100000", "checkpoint.every_steps=2", "checkpoint.memory_every_steps=1"};
  Program first = job_.start("run", settings);
  ASSERT_TRUE(first.wait_for("saved step 4 ")) << first.output << first.errors;
  Program second = job_.start("run", settings);
  const auto refused = second.finish();
  ASSERT_TRUE(refused);
  EXPECT_FALSE(refused->success());
  EXPECT_THAT(second.errors, AllOf(HasSubstr("a live run has the folder " + job_.path("run")), HasSubstr("on host ")));
  const size_t before = job_.metrics("run").size();
  first.output.clear();
  ASSERT_TRUE(first.wait_for("saved step ")) << first.output << first.errors;
  first.process().signal(SIGTERM);
  const auto exit = first.finish();
  ASSERT_TRUE(exit && exit->success()) << first.errors;
  const auto lines = job_.metrics("run");
  EXPECT_GT(lines.size(), before) << "its metrics still go where people look";
  EXPECT_EQ(lines.back()["step"], job_.summary("run")["steps"]);
  EXPECT_EQ(lines.size(), lines.back()["step"].get<size_t>());
}

// What happens where locks do not reach the other host: the later run has raised the generation.
TEST_F(RunFolders, ARunThatHasLostItsFolderCommitsNothingMore) {
  // Whatever it does where a disk is full: two runs do not write one folder.
  Program program = job_.start("run", {"--nproc", "2", "--set", "train.steps=100000", "checkpoint.every_steps=5",
                                       "checkpoint.keep=0", "checkpoint.on_error=continue"});
  ASSERT_TRUE(program.wait_for("saved step 5 ")) << program.output << program.errors;
  const os::Path owner = job_.path("run/checkpoints/owner.json");
  config::Json other = config::Json::parse(os::files().read(owner));
  other["generation"] = other["generation"].get<int64_t>() + 1;
  other["host"] = "elsewhere";
  os::files().write(owner.native() + ".new", other.dump());
  os::files().rename(owner.native() + ".new", owner);
  const size_t committed = job_.steps("run").size();
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_FALSE(exit->success());
  EXPECT_THAT(program.errors, AllOf(HasSubstr("on host elsewhere has taken over the folder"), HasSubstr("commits")));
  EXPECT_LE(job_.steps("run").size(), committed + 1) << "one may have been on its way";
}

TEST_F(RunFolders, CheckpointsMayLieInTheRunFolderItself) {
  const os::Path run = job_.path("run");
  const std::vector<std::string> settings = {"--set", "train.steps=6", "checkpoint.every_steps=5",
                                             "checkpoint.folder=" + run.native()};
  job_.run("run", settings);
  EXPECT_TRUE(os::files().exists(run / "step-6"));
  EXPECT_THAT(job_.metrics("run"), SizeIs(6));
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
