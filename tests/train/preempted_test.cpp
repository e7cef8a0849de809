#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/base/checksum.h"
#include "tesserae/os/shared_memory.h"
#include "tests/train/train_job.h"

// One job that is asked to end again and again, as on machines that are lent, and goes on by itself each time.

namespace tesserae::train {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr int requeue = 75;

class Preempted : public testing::Test {
 protected:
  /// What a scheduler starts each time.
  std::vector<std::string> arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {"--nproc",
                                    "2",
                                    "--resume",
                                    "auto",
                                    "--set",
                                    "hybrid_shard_degree=2",
                                    "train.steps=1000000",
                                    "optimizer.schedule=constant",
                                    "checkpoint.folder=" + job_.path("run/checkpoints"),
                                    "preemption.file=" + file_,
                                    "preemption.command=test -e " + notice_,
                                    "preemption.every_seconds=0.01",
                                    cat("preemption.exit_code=", requeue)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  static void signal_rank(Program& launcher, size_t rank, int number) {
    ::kill(children_of(launcher.process().id()).at(rank), number);
  }

  const TrainJob job_{"preempted"};
  const std::string file_ = job_.path("file"), notice_ = job_.path("notice");
};

TEST_F(Preempted, TwentyFourTimesAndTheResultIsThatOfAnUndisturbedRun) {
  struct Request {
    std::string told;  // as the summary begins; what the launcher is told it hands on, and any rank may hear it first
    std::function<void(Program&)> make;
  };
  const std::vector<Request> requests = {
      {"SIGTERM (rank ", [](Program& launcher) { launcher.process().signal(SIGTERM); }},
      {"SIGUSR1 (rank 1)", [](Program& launcher) { signal_rank(launcher, 1, SIGUSR1); }},
      {"the file " + file_, [this](Program&) { os::files().write(file_, ""); }},
      {"the command `test -e " + notice_, [this](Program&) { os::files().write(notice_, ""); }},
      {"SIGUSR1 (rank ", [](Program& launcher) { launcher.process().signal(SIGUSR1); }},
      {"SIGTERM (rank 1)", [](Program& launcher) { signal_rank(launcher, 1, SIGTERM); }},
  };
  int64_t done = 0;
  for (int i = 0; i < 24; ++i) {
    const Request& request = requests[static_cast<size_t>(i) % requests.size()];
    os::files().remove_all(notice_);  // the file of an earlier request stays
    Program program = job_.start("run", arguments());
    ASSERT_TRUE(program.wait_for(cat("step ", done + 1, "/"))) << program.output << program.errors;
    request.make(program);
    const auto exit = program.finish();
    ASSERT_TRUE(exit && exit->code == requeue) << exit->text() << program.output << program.errors;
    const config::Json summary = job_.summary("run");
    EXPECT_THAT(summary["stopped_by"].get<std::string>(), StartsWith(request.told));
    ASSERT_GT(summary["steps"], done);
    done = summary["steps"];
    EXPECT_EQ(job_.steps("run").back(), done);
  }

  const int64_t last = done + 2;
  const std::string end = cat("train.steps=", last);
  const std::string said = job_.run("run", arguments({end}));  // expects status 0
  EXPECT_THAT(said, HasSubstr(cat("resumed at step ", done, " from ")));
  job_.run("reference", {"--nproc", "2", "--set", "hybrid_shard_degree=2", "optimizer.schedule=constant", end,
                         "checkpoint.folder=" + job_.path("reference/checkpoints")});
  job_.expect_same_history("run", "reference", static_cast<size_t>(last));
  job_.expect_same_state("run", "reference", last);
  EXPECT_FALSE(job_.summary("run").contains("stopped_by"));
}

/// There was no time for storage: rank 1 is killed while it writes. What was done is in memory.
TEST_F(Preempted, IsSavedInMemoryFirst) {
  const std::vector<std::string> with_memory = arguments({"checkpoint.memory_every_steps=1000000"});
  Program program = job_.start("run", with_memory, {{"TESSERAE_CRASH_AT", "data-synced@1#1"}});
  ASSERT_TRUE(program.wait_for("step 3/")) << program.output << program.errors;
  program.process().signal(SIGTERM);
  const auto exit = program.finish();
  ASSERT_TRUE(exit && !exit->success() && exit->code != requeue) << exit->text();
  ASSERT_THAT(job_.steps("run"), IsEmpty());
  const size_t done = job_.metrics("run").size();

  const std::string said =
      job_.run("run", arguments({"checkpoint.memory_every_steps=1000000", cat("train.steps=", done + 3)}));
  EXPECT_THAT(said, HasSubstr(cat("resumed at step ", done, " from memory of the hosts")));
  EXPECT_EQ(job_.metrics("run").size(), done + 3);
  const std::string prefix = cat("tesserae-", to_hex(checksum(job_.path("run/checkpoints"))), "-");
  EXPECT_THAT(os::SharedMemory::names(prefix), IsEmpty());
}

TEST_F(Preempted, WithoutCheckpointsItIsNotEndedWell) {
  Program program = job_.start("run", {"--set", "train.steps=1000000", "preemption.exit_code=75",
                                       "preemption.file=" + file_, "preemption.every_seconds=0.01"});
  ASSERT_TRUE(program.wait_for("step 3/")) << program.output << program.errors;
  os::files().write(file_, "");
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGTERM) << "a job that is started again would begin anew";
}

}  // namespace
}  // namespace tesserae::train
