#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#include <csignal>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/os/port.h"
#include "tests/train/train_job.h"

// Jobs that lose ranks and go on: real processes, real signals. What is compared is a run of the same job that nothing
// disturbed; with dropout, so that random numbers count. bench/recovery.py does the same at random instants, often.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr size_t steps = 60;

class Recovery : public testing::Test {
 protected:
  static void SetUpTestSuite() { job_ = new TrainJob("recovery"); }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  /// Of four ranks, that replaces five times.
  static std::vector<std::string> with(std::vector<std::string> settings) {
    std::vector<std::string> arguments = {"--nproc", "4"};
    settings.insert(settings.begin(), {cat("train.steps=", steps), "recovery.replacements=5"});
    for (const std::string& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }

  /// Trains with `settings` and `victims` killed one after the other, each after some steps more; expects the history
  /// of an undisturbed run.
  static std::string disturbed(const std::string& name, const std::vector<std::string>& settings,
                               const std::vector<int>& victims, int number = SIGKILL,
                               const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = with(settings);
    arguments.insert(arguments.end(), more.begin(), more.end());
    const std::string alone = job_->reference(arguments);
    Program program = job_->start(name, arguments);
    std::set<pid_t> killed;
    std::map<int, pid_t> first;
    for (size_t i = 0; i < victims.size(); ++i) {
      EXPECT_TRUE(program.wait_for(cat("step ", 8 * (i + 1), "/"))) << program.output << program.errors;
      const std::map<int, pid_t> ranks = ranks_of(program);
      if (first.empty()) first = ranks;
      const auto victim = ranks.find(victims[i]);
      if (victim == ranks.end()) {
        ADD_FAILURE() << "there is no rank " << victims[i];
        continue;
      }
      ::kill(victim->second, number);
      killed.insert(victim->second);
      EXPECT_TRUE(program.wait_for(cat("place of rank ", victims[i]))) << program.output << program.errors;
      if (number == SIGSTOP) {
        EXPECT_EQ(::kill(victim->second, SIGCONT), -1) << "it could go on, and write";
      }
      const std::map<int, pid_t> now = ranks_of(program);
      for (const auto& [rank, process] : first) {
        const auto found = now.find(rank);
        if (found == now.end()) continue;  // the job has ended meanwhile
        EXPECT_EQ(found->second == process, !killed.contains(process)) << "rank " << rank;
      }
    }
    const auto exit = program.finish(seconds(200));
    EXPECT_TRUE(exit && exit->success()) << program.output << program.errors;
    job_->expect_same_history(name, alone, steps);
    EXPECT_EQ(job_->summary(name)["val_loss"], job_->summary(alone)["val_loss"]);
    return program.output + program.errors;
  }

  static void expect_recoveries(const std::string& name, size_t count, const std::string& from) {
    const config::Json found = job_->summary(name)["recoveries"];
    ASSERT_THAT(found, SizeIs(count));
    for (const config::Json& recovery : found) EXPECT_THAT(recovery["from"].get<std::string>(), HasSubstr(from));
  }

  static TrainJob* job_;
};

TrainJob* Recovery::job_ = nullptr;

TEST_F(Recovery, StateOnADisk) {
  disturbed("disk",
            {"hybrid_shard_degree=2", "offload.parameters=disk", "offload.gradients=disk", "offload.optimizer=disk"},
            {1, 2});
  // P below O: pieces are refreshed by the owners of their chunks, beside updates that some ranks have begun.
  disturbed("disk-refreshed",
            {R"(degrees={"parameters": 1, "gradients": 2, "optimizer": 2})", "offload.parameters=disk",
             "offload.gradients=disk", "offload.optimizer=disk"},
            {2, 0});
}

TEST_F(Recovery, AnyRankMayBeKilledWhereThereAreReplicas) {
  disturbed("any", {"hybrid_shard_degree=2"}, {2, 0, 3, 1});
  expect_recoveries("any", 4, "the ranks that are left");
}

TEST_F(Recovery, ANewRankMayBeKilledAsWell) {
  disturbed("again", {"hybrid_shard_degree=1"}, {1, 1, 1});
  expect_recoveries("again", 3, "the ranks that are left");
}

/// Its folder has an owner, and nobody may have a state yet.
TEST_F(Recovery, WhileTheRunBegins) {
  const std::vector<std::string> arguments = with({"hybrid_shard_degree=1"});
  const std::string alone = job_->reference(arguments);
  for (const int victim : {0, 1, 2, 3}) {
    const std::string name = cat("begins-", victim);
    Program program = job_->start(name, arguments);
    const os::Deadline deadline(seconds(60));
    while (!os::files().exists(job_->path(name) + "/owner.json") && !deadline.passed()) {
      os::sleep_for(std::chrono::milliseconds(1));
    }
    const std::map<int, pid_t> ranks = ranks_of(program);
    ASSERT_TRUE(ranks.contains(victim)) << program.output << program.errors;
    ::kill(ranks.at(victim), SIGKILL);
    const auto exit = program.finish(seconds(200));
    EXPECT_TRUE(exit && exit->success()) << program.output << program.errors;
    // One that was lost before all knew of the folder leaves it empty, but for its claim.
    const std::string other = name + "-2";
    job_->expect_same_history(os::files().exists(job_->path(other)) ? other : name, alone, steps);
  }
}

TEST_F(Recovery, UnequalDegreesAndMixedPrecision) {
  disturbed("unequal",
            {R"(degrees={"parameters": 1, "gradients": 2, "optimizer": 2})", "precision=fp16", "optimizer.name=sgd",
             "optimizer.momentum=0.9", "optimizer.lr=0.01"},
            {3, 0});
  expect_recoveries("unequal", 2, "the ranks that are left");
}

TEST_F(Recovery, GlooCarriesAllBytes) {
  disturbed("gloo", {"hybrid_shard_degree=2", "run.backend=gloo"}, {1, 2});
  expect_recoveries("gloo", 2, "the ranks that are left");
}

TEST_F(Recovery, SplitLayers) {
  disturbed("split", {"hybrid_shard_degree=1", "tensor_parallel_degree=2"}, {3, 0});
  expect_recoveries("split", 2, "the ranks that are left");
}

TEST_F(Recovery, CutSequences) {
  disturbed("cut", {"hybrid_shard_degree=2", "context_parallel_degree=2", "model.dropout=0"}, {0, 2});
  expect_recoveries("cut", 2, "the ranks that are left");
}

TEST_F(Recovery, ExpertsAndTheBiasesOfTheirRouters) {
  disturbed("experts",
            {"hybrid_shard_degree=1", "expert_parallel_degree=2", "model.experts=4", "model.experts_per_token=2",
             "model.bias_rate=0.01"},
            {1, 0});
  expect_recoveries("experts", 2, "the ranks that are left");
}

TEST_F(Recovery, DegreesThatTheDialHasChanged) {
  disturbed("turned", {"hybrid_shard_degree=4", R"(dial.schedule=[{"step": 4, "hybrid_shard_degree": 2}])"}, {2, 0});
  expect_recoveries("turned", 2, "the ranks that are left");
}

TEST_F(Recovery, StateThatTheDialHasPutOnADisk) {
  // Long enough for a program that has to load first.
  const std::vector<std::string> arguments = with({"hybrid_shard_degree=2", "train.steps=300"});
  const std::string alone = job_->reference(arguments);
  Program program = job_->start("disk-later", arguments);
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  Program dial({TESSERAE_PROGRAM, "dial", job_->path("disk-later"), "--offload", "all=disk"});
  const auto turned = dial.finish(std::chrono::seconds(60));
  ASSERT_TRUE(turned && turned->success()) << dial.output << dial.errors;
  ::kill(ranks_of(program).at(2), SIGKILL);
  EXPECT_TRUE(program.wait_for("place of rank 2")) << program.output << program.errors;
  const auto exit = program.finish(std::chrono::seconds(200));
  EXPECT_TRUE(exit && exit->success()) << program.output << program.errors;
  job_->expect_same_history("disk-later", alone, 300);
  expect_recoveries("disk-later", 1, "the ranks that are left");
  EXPECT_TRUE(job_->metrics("disk-later").back().contains("disk_read_bytes")) << "it is still there";
}

TEST_F(Recovery, WithoutReplicasSnapshotsInMemory) {
  disturbed("memory", {"hybrid_shard_degree=4", "checkpoint.memory_every_steps=1"}, {0, 2});
  expect_recoveries("memory", 2, "memory of the hosts");
}

TEST_F(Recovery, AJobThatRollsBackItself) {
  // A loss that hardly falls, so that noise makes spikes.
  disturbed("rolls-back",
            {"hybrid_shard_degree=2", "bad_steps.policy=rollback", "bad_steps.loss_spike=1.0008",
             "bad_steps.limit=1000", "checkpoint.memory_every_steps=4", "optimizer.lr=1e-6"},
            {1, 2});
  EXPECT_GT(job_->summary("rolls-back")["bad_steps"].size(), 1);
}

TEST_F(Recovery, WithoutSnapshotsTheNewestCheckpoint) {
  const std::string said =
      disturbed("stored", {"hybrid_shard_degree=4", "checkpoint.every_steps=5", "checkpoint.async=false"}, {3, 0});
  expect_recoveries("stored", 2, "checkpoints/step-");
  EXPECT_THAT(said, HasSubstr("steps back"));
}

TEST_F(Recovery, BeforeTheFirstCheckpointFromTheBeginning) {
  disturbed("early", {"hybrid_shard_degree=4", "checkpoint.every_steps=1000"}, {2});
  EXPECT_EQ(job_->summary("early")["recoveries"][0]["step"], 0);
}

TEST_F(Recovery, FromTheBeginningWithTheDegreesOfTheBeginning) {
  disturbed("anew",
            {"hybrid_shard_degree=2", R"(dial.schedule=[{"step": 4, "hybrid_shard_degree": 4}])",
             "checkpoint.every_steps=1000"},
            {1});
  EXPECT_EQ(job_->summary("anew")["recoveries"][0]["step"], 0);
}

TEST_F(Recovery, BeforeItsFirstCheckpointARunGoesBackToTheOneThatItContinues) {
  job_->run("past", with({"hybrid_shard_degree=4", "checkpoint.every_steps=5", "checkpoint.keep=0"}));
  disturbed("named", {"hybrid_shard_degree=4", "checkpoint.every_steps=1000"}, {2}, SIGKILL,
            {"--resume", job_->path("past/checkpoints/step-5")});
  EXPECT_EQ(job_->summary("named")["recoveries"][0]["step"], 5);
}

TEST_F(Recovery, ACheckpointOfAnotherRunInTheSameFolderDoesNotCount) {
  const std::string folder = "checkpoint.folder=" + job_->path("shared");
  job_->run("other", with({"hybrid_shard_degree=4", "checkpoint.every_steps=30", folder}));
  Program program = job_->start("shares", with({"hybrid_shard_degree=4", "checkpoint.every_steps=5", folder}));
  ASSERT_TRUE(program.wait_for("saved step 10 ")) << program.output << program.errors;
  ::kill(ranks_of(program).at(3), SIGKILL);
  ASSERT_TRUE(program.finish()->success()) << program.output << program.errors;
  const int64_t step = job_->summary("shares")["recoveries"][0]["step"];
  EXPECT_GE(step, 10);
  EXPECT_LT(step, 30) << "not the other run's";
  job_->expect_same_history("shares", "other", steps);
}

TEST_F(Recovery, ACheckpointOfAnotherRunBetweenTwoOfItsOwnDoesNotCount) {
  const std::string folder = "checkpoint.folder=" + job_->path("shared-closely");
  job_->run("every-step", with({"hybrid_shard_degree=4", "checkpoint.every_steps=1", "checkpoint.keep=0", folder}));
  Program program = job_->start(
      "now-and-then", with({"hybrid_shard_degree=4", "checkpoint.every_steps=10", "checkpoint.keep=0", folder}));
  ASSERT_TRUE(program.wait_for("saved step 10 ")) << program.output << program.errors;
  ::kill(ranks_of(program).at(3), SIGKILL);
  ASSERT_TRUE(program.finish()->success()) << program.output << program.errors;
  const int64_t step = job_->summary("now-and-then")["recoveries"][0]["step"];
  EXPECT_EQ(step % 10, 0) << "the other run's";
  job_->expect_same_history("now-and-then", "every-step", steps);
}

/// The others have written their parts, and do not know that it is not committed.
TEST_F(Recovery, ASaveThatRankZeroDidNotCommitIsMadeAgain) {
  const std::vector<std::string> settings = {"hybrid_shard_degree=2", "checkpoint.every_steps=20", "checkpoint.keep=0"};
  Program program = job_->start("uncommitted", with(settings), {{"TESSERAE_CRASH_AT", "all-done@0#2"}});
  ASSERT_TRUE(program.finish()->success()) << program.output << program.errors;
  const int64_t from = job_->summary("uncommitted")["recoveries"][0]["step"];
  std::vector<int64_t> saved;
  for (const auto& found : checkpoint::list_checkpoints(job_->path("uncommitted/checkpoints")))
    saved.push_back(found.step);
  EXPECT_THAT(saved, testing::Contains(testing::AllOf(testing::Ge(from), testing::Lt(60))));
}

TEST_F(Recovery, SavesBesideTrainingGoOn) {
  job_->run("saving-alone", with({"hybrid_shard_degree=2", cat("checkpoint.every_steps=", steps)}));
  disturbed("saving", {"hybrid_shard_degree=2", "checkpoint.every_steps=3", "checkpoint.keep=2"}, {1, 0});
  job_->expect_same_state("saving", "saving-alone", steps);
}

TEST_F(Recovery, ARankThatIsStoppedForTooLongIsReplaced) {
  disturbed("stopped", {"hybrid_shard_degree=2", "run.deadline_seconds=8"}, {1}, SIGSTOP);
  expect_recoveries("stopped", 1, "the ranks that are left");
}

#if defined(__x86_64__)
/// Of a thread that is held: whether it is in torch's kernels, and so in no operation between ranks.
bool computes(pid_t process) {
  user_regs_struct registers = {};
  EXPECT_EQ(::ptrace(PTRACE_GETREGS, process, nullptr, &registers), 0);
  std::istringstream maps(os::files().read(cat("/proc/", process, "/maps")));
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libtorch_cpu") == std::string::npos) continue;
    uint64_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (registers.rip >= begin && registers.rip < end) return true;
  }
  return false;
}

/// Holds the main thread of a process, which trains there, while it computes; the other threads go on: it hangs, and is
/// alive. Returns the signal that has ended it, which nobody else can see before; 0: none has within a minute.
int hang_until_end(pid_t process) {
  EXPECT_EQ(::ptrace(PTRACE_SEIZE, process, nullptr, nullptr), 0);
  for (bool held = false; !held;) {
    EXPECT_EQ(::ptrace(PTRACE_INTERRUPT, process, nullptr, nullptr), 0);
    int status = 0;
    if (::waitpid(process, &status, __WALL) != process || !WIFSTOPPED(status)) return 0;
    held = computes(process);
    if (held) break;
    ::ptrace(PTRACE_CONT, process, nullptr, nullptr);
    os::sleep_for(std::chrono::milliseconds(1));
  }
  for (const os::Deadline ending{seconds(120)}; !ending.passed(); os::sleep_for(std::chrono::milliseconds(5))) {
    int status = 0;
    if (::waitpid(process, &status, __WALL | WNOHANG) == process && WIFSIGNALED(status)) return WTERMSIG(status);
  }
  ::ptrace(PTRACE_DETACH, process, nullptr, nullptr);
  return 0;
}

TEST_F(Recovery, ARankThatHangsIsReplaced) {
  const auto arguments = with({"hybrid_shard_degree=2", "run.deadline_seconds=8", "model.dimension=128",
                               "train.batch_per_rank=4", "train.accumulate=1"});
  const std::string alone = job_->reference(arguments);
  Program program = job_->start("hangs", arguments);
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  EXPECT_EQ(hang_until_end(ranks_of(program).at(2)), SIGKILL);
  const auto exit = program.finish(seconds(200));
  ASSERT_TRUE(exit && exit->success()) << program.output << program.errors;
  EXPECT_THAT(program.output + program.errors, HasSubstr("rank 2 of 4 is killed: it stopped or hangs"));
  expect_recoveries("hangs", 1, "the ranks that are left");
  job_->expect_same_history("hangs", alone, steps);
}
#endif

TEST_F(Recovery, WhereRanksCannotGoOnAllBeginAgain) {
  const std::vector<std::string> settings = {"hybrid_shard_degree=4", "recovery.replacements=0",
                                             "recovery.max_restarts=2", "checkpoint.every_steps=5"};
  const std::string alone = job_->reference(with(settings));
  Program program = job_->start("begins-again", with(settings));
  ASSERT_TRUE(program.wait_for("saved step 10 ")) << program.output << program.errors;
  ASSERT_TRUE(program.wait_for("step 12/")) << program.output << program.errors;
  ::kill(ranks_of(program).at(1), SIGKILL);
  const auto exit = program.finish(seconds(200));
  ASSERT_TRUE(exit && exit->success()) << program.output << program.errors;
  EXPECT_THAT(program.errors, HasSubstr("all ranks begin again in 1 s (1 of 2)"));
  EXPECT_THAT(program.output, HasSubstr("resumed at step "));
  job_->expect_same_history("begins-again", alone, steps);
}

TEST_F(Recovery, AJobOfOneRankBeginsAgain) {
  std::vector<std::string> arguments =
      with({"hybrid_shard_degree=1", "recovery.replacements=0", "recovery.max_restarts=1", "checkpoint.every_steps=5",
            "model.dimension=128", "train.batch_per_rank=4"});  // steps that take long enough to be killed in
  arguments[1] = "1";
  const std::string alone = job_->reference(arguments);
  Program program = job_->start("one-begins-again", arguments);
  ASSERT_TRUE(program.wait_for("saved step 10 ")) << program.output << program.errors;
  const std::map<int, pid_t> ranks = ranks_of(program);
  ASSERT_TRUE(ranks.contains(0)) << program.output << program.errors;
  ::kill(ranks.at(0), SIGKILL);
  const auto exit = program.finish(seconds(200));
  ASSERT_TRUE(exit && exit->success()) << program.output << program.errors;
  EXPECT_THAT(program.errors, HasSubstr("all ranks begin again in 1 s (1 of 1)"));
  EXPECT_THAT(program.output, HasSubstr("resumed at step "));
  job_->expect_same_history("one-begins-again", alone, steps);
}

TEST_F(Recovery, WithoutAnyCopyTheJobEndsAndSaysWhatWouldHaveHelped) {
  Program program = job_->start("nothing", with({"hybrid_shard_degree=4"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  // By way of the launcher, as all that ranks write there: it may come later.
  ASSERT_TRUE(program.wait_for("nothing is saved: the loss of one will end the job")) << program.errors;
  ::kill(ranks_of(program).at(1), SIGKILL);
  EXPECT_EQ(program.finish()->code, 3);
  EXPECT_THAT(program.errors, HasSubstr("of what rank 1 held, no other rank has a copy, and nothing was saved"));
  EXPECT_THAT(program.errors, HasSubstr("checkpoint.memory_every_steps"));
}

TEST_F(Recovery, OnceReplacementsAreUsedUpALossEndsTheJob) {
  Program program = job_->start("spent", with({"hybrid_shard_degree=2", "recovery.replacements=1"}));
  for (const int step : {8, 24}) {
    ASSERT_TRUE(program.wait_for(cat("step ", step, "/"))) << program.errors;
    ::kill(ranks_of(program).at(2), SIGKILL);
  }
  EXPECT_EQ(program.finish()->code, 128 + SIGKILL);
  EXPECT_THAT(program.errors, HasSubstr("a new process takes its place (1 of 1)"));
  EXPECT_THAT(program.errors, HasSubstr("rank 2 of 4 was killed by signal 9 (Killed); the other ranks were ended"));
}

/// Each host's launcher starts the new process of its own rank; the first one, which decides, also replaces rank 0.
TEST_F(Recovery, RanksOfTwoHosts) {
  std::vector<std::string> arguments = with({"hybrid_shard_degree=2"});
  const std::string alone = job_->reference(arguments);
  arguments[1] = "2";
  const std::string port = std::to_string(os::free_port());
  const auto start = [&](const char* host) {
    return job_->start(
        "hosts", arguments,
        {{"PET_NNODES", "2"}, {"PET_NODE_RANK", host}, {"MASTER_ADDR", "127.0.0.2"}, {"MASTER_PORT", port}});
  };
  Program one = start("0"), other = start("1");
  const std::vector<int> victims = {3, 0, 2};
  for (size_t i = 0; i < victims.size(); ++i) {
    ASSERT_TRUE(one.wait_for(cat("step ", 8 * (i + 1), "/"))) << one.output << one.errors;
    const std::map<int, pid_t> ranks = ranks_of(victims[i] < 2 ? one : other);
    ASSERT_TRUE(ranks.contains(victims[i]));
    ::kill(ranks.at(victims[i]), SIGKILL);
    ASSERT_TRUE(one.wait_for(cat("place of rank ", victims[i]))) << one.output << one.errors;
  }
  for (Program* program : {&one, &other}) {
    const auto exit = program->finish(seconds(200));
    EXPECT_TRUE(exit && exit->success()) << program->output << program->errors;
  }
  job_->expect_same_history("hosts", alone, steps);
  expect_recoveries("hosts", 3, "the ranks that are left");
}

TEST_F(Recovery, SigtermStillEndsAJobThatHasRecovered) {
  Program program = job_->start("asked", with({"hybrid_shard_degree=2", "checkpoint.every_steps=1000"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  ::kill(ranks_of(program).at(1), SIGKILL);
  ASSERT_TRUE(program.wait_for("place of rank 1")) << program.errors;
  program.process().signal(SIGTERM);
  EXPECT_EQ(program.finish()->code, 0) << program.errors;
  EXPECT_THAT(job_->steps("asked"), SizeIs(1));
}

TEST_F(Recovery, AReaderThatGoesAwayIsNoLoss) {
  Program program = job_->start("unread", with({"hybrid_shard_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  program.stop_reading_output();
  ASSERT_TRUE(program.wait_for("rank 0: nobody reads standard output any more")) << program.errors;
  ::kill(ranks_of(program).at(0), SIGKILL);  // the new one has the same output
  const auto exit = program.finish();
  EXPECT_TRUE(exit && exit->success()) << program.errors;
  expect_recoveries("unread", 1, "the ranks that are left");
  job_->expect_same_history("unread", job_->reference(with({"hybrid_shard_degree=2"})), steps);
}

TEST_F(Recovery, NeitherIsOneThatReadWhatTheLauncherSays) {
  Program program = job_->start("unheard", with({"hybrid_shard_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  program.stop_reading();
  ::kill(ranks_of(program).at(1), SIGKILL);
  const auto exit = program.finish();
  EXPECT_TRUE(exit && exit->success()) << (exit ? exit->text() : "it hangs");
  expect_recoveries("unheard", 1, "the ranks that are left");

  Program alone = job_->start("unread-alone", {});
  ASSERT_TRUE(alone.wait_for("step 8/")) << alone.errors;
  alone.stop_reading();
  EXPECT_TRUE(alone.finish()->success()) << "without a launcher";
}

}  // namespace
}  // namespace tesserae::train
