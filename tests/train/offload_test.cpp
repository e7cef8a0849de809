#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/train/train_job.h"

// Runs whose state lies on a disk: real processes, real files, real signals. tests/parity/offload_test.cpp has the
// numbers of every strategy.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

class Offload : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("offload");
    os::files().make_directories(job_->path("scratch"));
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static std::vector<std::string> with(int ranks, std::vector<std::string> settings) {
    std::vector<std::string> arguments = {"--nproc", cat(ranks)};
    for (const std::string& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }
  static std::vector<std::string> on_disk(std::vector<std::string> settings,
                                          const std::vector<std::string>& states = {"parameters", "gradients",
                                                                                    "optimizer"}) {
    for (const std::string& state : states) settings.push_back(cat("offload.", state, "=disk"));
    settings.push_back("offload.folder=" + job_->path("scratch"));
    return settings;
  }

  static TrainJob* job_;
};

TrainJob* Offload::job_ = nullptr;

/// 11 M parameters, whose state does not fit in what the limit leaves.
std::vector<std::string> large(int64_t steps) {
  return {"optimizer.schedule=constant", "model.dimension=384",      "model.layers=6",
          "train.accumulate=1",          cat("train.steps=", steps), "precision=fp32"};
}

TEST_F(Offload, AModelThatDoesNotFitTrainsToTheSameLosses) {
  std::vector<std::string> settings = large(4);
  job_->run("fits", with(1, settings));
  settings.push_back("memory_limit=300MiB");
  const std::string said = job_->run("offloaded", with(1, on_disk(settings)));
  EXPECT_THAT(said, AllOf(HasSubstr("parameters on disk, gradients on disk, optimizer on disk: "),
                          HasSubstr("300 MB of memory a rank"), HasSubstr(" in "), HasSubstr(" out")));
  job_->expect_same_history("offloaded", "fits", 4);
  const config::Json last = job_->metrics("offloaded").back();
  EXPECT_GT(last["disk_read_bytes"], 30 << 20);
  EXPECT_GT(last["disk_written_bytes"], 30 << 20);
#ifndef __SANITIZE_THREAD__  // which notes each byte that is written, in memory of its own
  EXPECT_LT(job_->summary("offloaded")["peak_memory_bytes"], int64_t{300} << 20);
#endif
  EXPECT_THAT(os::files().list(job_->path("scratch")), IsEmpty());
}

TEST_F(Offload, ACheckpointGoesOnWithOtherTiers) {
  const std::vector<std::string> saving = {"hybrid_shard_degree=2", "checkpoint.every_steps=8", "checkpoint.keep=0",
                                           "optimizer.schedule=constant"};
  job_->run("reference", with(4, saving));
  std::vector<std::string> half = saving;
  half.insert(half.end(), {"train.steps=16", "checkpoint.async=true"});
  job_->run("half", with(4, on_disk(half)));
  job_->expect_same_tensors("half", "reference", 16);
  for (const auto& [name, settings] :
       {std::pair{"in-memory", saving}, {"on-disk", on_disk(saving)}, {"optimizer", on_disk(saving, {"optimizer"})}}) {
    job_->copy("half", name);
    std::vector<std::string> arguments = with(4, settings);
    arguments.insert(arguments.end(), {"--resume", "auto"});
    job_->run(name, arguments);
    job_->expect_same_history(name, "reference", 24);
    job_->expect_same_tensors(name, "reference", 24);
  }
}

TEST_F(Offload, TheDialIsTurnedByASchedule) {
  const std::vector<std::string> settings = {
      R"(dial.schedule=[{"step": 6, "hybrid_shard_degree": 2}, {"step": 12, "hybrid_shard_degree": 1}])"};
  job_->run("turned", with(4, settings));
  job_->run("turned-on-disk", with(4, on_disk(settings)));
  job_->expect_same_history("turned-on-disk", "turned", 24);
}

TEST_F(Offload, AutoTakesTheDiskWhereNoDegreeFitsInMemory) {
  std::vector<std::string> settings = large(3);
  settings.insert(settings.end(), {"memory_limit=300MiB", "offload.folder=" + job_->path("scratch")});
  job_->run("by-hand", with(1, on_disk(settings)));
  settings.push_back("hybrid_shard_degree=auto");
  const std::string said = job_->run("auto", with(1, settings));
  EXPECT_THAT(said, AllOf(HasSubstr("in memory even at the highest degree"), HasSubstr("optimizer on disk")));
  job_->expect_same_history("auto", "by-hand", 3);
  settings = large(3);
  settings.push_back("hybrid_shard_degree=auto");
  const std::string roomy = job_->run("roomy", with(1, settings));
  EXPECT_THAT(roomy, testing::Not(HasSubstr("on disk")));
}

TEST_F(Offload, NothingIsLeftOfAJobThatIsKilled) {
  std::mt19937 random(5);
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<std::string> settings = large(50);
    settings.push_back("memory_limit=250MiB");
    settings.push_back("checkpoint.every_steps=2");
    std::vector<std::string> arguments = with(1, on_disk(settings));
    arguments.insert(arguments.end(), {"--resume", "auto"});
    Program program = job_->start("killed", arguments);
    ASSERT_TRUE(program.wait_for(cat("saved step ", 2 * (turn + 1), " "))) << program.output << program.errors;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 700));
    ::kill(-program.process().id(), SIGKILL);
    program.finish();
    EXPECT_THAT(os::files().list(job_->path("scratch")), IsEmpty());
  }
  std::vector<std::string> settings = large(10);
  settings.push_back("checkpoint.every_steps=2");
  job_->run("undisturbed", with(1, settings));
  std::vector<std::string> arguments = with(1, on_disk(settings));
  arguments.insert(arguments.end(), {"--resume", "auto"});
  job_->run("killed", arguments);
  job_->expect_same_tensors("killed", "undisturbed", 10);
}

TEST_F(Offload, AFolderThatCannotBeUsedEndsTheRunBeforeItBegins) {
  Program program = job_->start("nowhere", with(1, {"offload.optimizer=disk", "offload.folder=/proc/nowhere"}));
  const auto exit = program.finish();
  ASSERT_TRUE(exit && !exit->success());
  EXPECT_THAT(program.errors, HasSubstr("/proc/nowhere"));
}

TEST_F(Offload, ALimitThatCannotBeHeldIsSaid) {
  const std::string said = job_->run("tight", with(1, on_disk({"memory_limit=20MB", "train.steps=3"})));
  EXPECT_THAT(said, HasSubstr("the memory limit cannot be held: a rank has 19 MB and needed "));
}

}  // namespace
}  // namespace tesserae::train
