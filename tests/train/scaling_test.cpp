#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "tests/train/train_job.h"

// Jobs whose number of ranks changes while they train: real processes, the real program. What is compared is a run of
// the same job with the ranks of the beginning; without dropout, whose masks belong to ranks.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

constexpr size_t steps = 120;

class Scaling : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("scaling");
    job_->run("alone", with(4, {}));
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static std::vector<std::string> with(int ranks, std::vector<std::string> settings) {
    std::vector<std::string> arguments = {"--nproc", std::to_string(ranks)};
    settings.insert(settings.begin(),
                    {cat("train.steps=", steps), "model.dropout=0", "optimizer.lr=1e-3", "train.eval_batches=2"});
    for (const std::string& setting : settings) arguments.insert(arguments.end(), {"--set", setting});
    return arguments;
  }

  /// Whether the run did it, and what it said.
  static std::pair<bool, std::string> scale(const std::string& run, int ranks) {
    const dial::Json event = job_->ask(run, {{"ask", "scale"}, {"ranks", ranks}});
    if (event.at("event") == "error") return {false, event.at("message").get<std::string>()};
    return {true, cat(event.at("from").get<int>(), " -> ", event.at("to").get<int>(), " ranks, ")};
  }

  /// The same by `tesserae scale`: its exit status and all that it wrote.
  static std::pair<int, std::string> scale_by_program(const std::string& run, int ranks) {
    Program program({TESSERAE_PROGRAM, "scale", job_->path(run), "--ranks", std::to_string(ranks), "--wait", "100"});
    const auto exit = program.finish();
    return {exit ? exit->code : -1, program.output + program.errors};
  }

  static void expect_scaled(const std::string& run, int from, int to) {
    const auto [done, text] = scale(run, to);
    EXPECT_TRUE(done) << text;
    EXPECT_THAT(text, HasSubstr(cat(from, " -> ", to, " ranks, ")));
  }

  static void expect_end(Program& program) {
    const auto exit = program.finish(seconds(200));
    EXPECT_TRUE(exit && exit->success()) << (exit ? exit->text() : "it hangs") << program.output << program.errors;
  }

  static void stop(Program& program) {
    program.process().signal(SIGTERM);
    const auto exit = program.finish();
    EXPECT_TRUE(exit && exit->code == 128 + SIGTERM) << program.output << program.errors;
  }

  /// Every step once, and the losses of `reference`, as far as that went, to rounding.
  static void expect_same_steps(const std::string& run, const std::string& reference) {
    EXPECT_LT(job_->difference_in_history(run, reference), 1e-5);
  }

  static void expect_same_losses(const std::string& run, const std::string& reference = "alone") {
    ASSERT_THAT(job_->metrics(run), SizeIs(steps));
    expect_same_steps(run, reference);
    const double loss = job_->summary(run)["val_loss"], wanted = job_->summary(reference)["val_loss"];
    EXPECT_NEAR(loss, wanted, 1e-5 * wanted);
  }

  static TrainJob* job_;
};

TrainJob* Scaling::job_ = nullptr;

TEST_F(Scaling, FewerRanksAndMoreAgainInTheSameProcesses) {
  Program program = job_->start("both", with(4, {}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const std::map<int, pid_t> first = ranks_of(program);
  expect_scaled("both", 4, 2);
  const std::map<int, pid_t> fewer = ranks_of(program);
  expect_scaled("both", 2, 4);
  const std::map<int, pid_t> again = ranks_of(program);
  expect_end(program);
  ASSERT_THAT(again, SizeIs(4));
  for (const int rank : {0, 1}) {
    EXPECT_EQ(fewer.at(rank), first.at(rank));
    EXPECT_EQ(again.at(rank), first.at(rank));
  }
  EXPECT_NE(again.at(3), first.at(3));
  expect_same_losses("both");

  const config::Json summary = job_->summary("both");
  ASSERT_THAT(summary["scalings"], SizeIs(2));
  EXPECT_EQ(summary["scalings"][0]["from"], 4);
  EXPECT_EQ(summary["scalings"][0]["to"], 2);
  EXPECT_GT(summary["scalings"][1]["seconds"], 0.0);
  EXPECT_EQ(summary["world_size"], 4);
  EXPECT_EQ(summary["layout"]["O"], 4) << "sharded over all again";
  const size_t step = summary["scalings"][0]["step"];
  const std::vector<config::Json> lines = job_->metrics("both");
  EXPECT_EQ(lines[step - 1]["ranks"], 4);
  EXPECT_EQ(lines[step]["ranks"], 2);
  EXPECT_THAT(program.output, HasSubstr(cat("step ", step, ": 4 -> 2 ranks in ")));
}

TEST_F(Scaling, DownToOneAndUpBeyondTheBeginning) {
  Program program = job_->start("far", with(4, {"hybrid_shard_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  expect_scaled("far", 4, 1);
  expect_scaled("far", 1, 8);
  expect_end(program);
  expect_same_losses("far");
  EXPECT_EQ(job_->summary("far")["layout"]["O"], 2) << "as configured";
}

TEST_F(Scaling, SizesThatCannotBeAreRefusedAndTrainingGoesOn) {
  Program program = job_->start("refused", with(4, {}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const auto [done, text] = scale("refused", 3);
  EXPECT_FALSE(done);
  EXPECT_THAT(text, AllOf(HasSubstr("the job keeps its 4 ranks, not 3: the 16 samples of a step are no multiple of 3"),
                          HasSubstr("nearest possible: 2 and 4")));
  EXPECT_FALSE(scale("refused", 0).first);
  EXPECT_THAT(scale("refused", 100).second, HasSubstr("nearest possible: 16"));
  EXPECT_THAT(scale("refused", 4).second, HasSubstr("4 -> 4 ranks"));
  expect_end(program);
  job_->expect_same_history("refused", "alone", steps);
  EXPECT_FALSE(job_->summary("refused").contains("scalings"));
}

TEST_F(Scaling, AxesMustDivideTheRanks) {
  job_->run("axes-alone", with(4, {"tensor_parallel_degree=2"}));
  Program program = job_->start("axes", with(4, {"tensor_parallel_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  EXPECT_THAT(scale("axes", 3).second,
              AllOf(HasSubstr("a multiple of 2 ranks, not 3"), HasSubstr("nearest possible: 2 and 4")));
  expect_scaled("axes", 4, 2);
  expect_end(program);
  expect_same_losses("axes", "axes-alone");
  EXPECT_EQ(job_->summary("axes")["layout"]["N"], 1);
}

TEST_F(Scaling, OnlyRanksOfOurLauncherChangeTheirNumber) {
  Program program = job_->start("single", with(1, {}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  EXPECT_THAT(scale("single", 2).second, HasSubstr("only that it has started"));
  expect_end(program);
}

TEST_F(Scaling, DialAndMonitorWorkAfterItAndWhatTheDialWasTurnedToStays) {
  // Of so many steps that it is there for whoever asks; it is told to end.
  const std::vector<std::string> arguments = with(4, {"train.steps=100000"});
  Program program = job_->start("dialled", arguments);
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const auto dial = [](const std::vector<std::string>& more) {
    std::vector<std::string> words = {TESSERAE_PROGRAM, "dial", job_->path("dialled")};
    words.insert(words.end(), more.begin(), more.end());
    Program client(words);
    client.finish();
    return client.output + client.errors;
  };
  EXPECT_THAT(dial({"--degree", "1"}), HasSubstr("-> P=1 G=1 O=1"));
  const auto [refused, why] = scale_by_program("dialled", 3);
  EXPECT_EQ(refused, 1);
  EXPECT_THAT(why, HasSubstr("the job keeps its 4 ranks, not 3: the 16 samples of a step are no multiple of 3"));
  const auto [scaled, text] = scale_by_program("dialled", 2);
  EXPECT_EQ(scaled, 0) << text;
  EXPECT_THAT(text, HasSubstr(": 4 -> 2 ranks, P=1 G=1 O=1, in "));
  Program stacks({TESSERAE_PROGRAM, "stacks", job_->path("dialled")});
  EXPECT_TRUE(stacks.finish()->success()) << stacks.errors;
  EXPECT_THAT(stacks.output, AllOf(HasSubstr("stacks-1.txt"), Not(HasSubstr("stacks-2.txt"))));
  EXPECT_THAT(dial({"--show"}), HasSubstr("P=1 G=1 O=1 on 2 ranks"));
  EXPECT_THAT(dial({"--degree", "4"}), HasSubstr("4 does not divide the 2 ranks"));
  EXPECT_THAT(dial({"--degree", "2"}), HasSubstr("P=1 G=1 O=1 -> P=2 G=2 O=2"));
  stop(program);
  const size_t done = job_->metrics("dialled").size();
  Program undisturbed = job_->start("dialled-alone", arguments);
  ASSERT_TRUE(undisturbed.wait_for(cat("step ", done, "/"))) << undisturbed.output << undisturbed.errors;
  stop(undisturbed);
  expect_same_steps("dialled", "dialled-alone");
}

TEST_F(Scaling, WithCheckpointsSnapshotsAndAScheduleOfTheDial) {
  Program program = job_->start("saving", with(4, {"checkpoint.every_steps=7", "checkpoint.memory_every_steps=2",
                                                   R"(dial.schedule=[{"step": 4, "hybrid_shard_degree": 1},
                                                   {"step": 80, "hybrid_shard_degree": 4}])"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  expect_scaled("saving", 4, 2);
  expect_end(program);
  expect_same_losses("saving");
  EXPECT_EQ(job_->metrics("saving")[78]["degrees"], config::Json({1, 1, 1}));
  EXPECT_EQ(job_->metrics("saving")[81]["degrees"], config::Json({2, 2, 2})) << "the nearest to 4";
}

TEST_F(Scaling, LostRanksAreReplacedAfterIt) {
  Program program = job_->start("lost", with(4, {"recovery.replacements=3", "hybrid_shard_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  expect_scaled("lost", 4, 2);  // without replicas now: back to what was kept
  ::kill(ranks_of(program).at(1), SIGKILL);
  EXPECT_TRUE(program.wait_for("place of rank 1")) << program.output << program.errors;
  expect_scaled("lost", 2, 4);
  ::kill(ranks_of(program).at(0), SIGKILL);
  EXPECT_TRUE(program.wait_for("place of rank 0")) << program.output << program.errors;
  expect_end(program);
  expect_same_losses("lost");
  EXPECT_THAT(job_->summary("lost")["scalings"], SizeIs(2)) << "the new rank 0 knows";
  EXPECT_THAT(job_->summary("lost")["recoveries"], SizeIs(2));
}

/// Killed in the save of the step, and once it is saved: when ranks leave, wait, and meet.
class KilledWhileScaling : public Scaling, public testing::WithParamInterface<std::pair<int, int>> {};

TEST_P(KilledWhileScaling, TheJobRecovers) {
  const auto [victim, milliseconds] = GetParam();
  const std::string run = cat("killed-", victim, "-", milliseconds);
  Program program = job_->start(run, with(4, {"recovery.replacements=3", "hybrid_shard_degree=2",
                                              "checkpoint.every_steps=1000", "run.deadline_seconds=20"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const pid_t process = ranks_of(program).at(victim);
  dial::Client client(job_->path(run), {{"ask", "scale"}, {"ranks", 2}});
  ASSERT_TRUE(program.wait_for("saved step")) << program.output << program.errors;
  os::sleep_for(std::chrono::milliseconds(milliseconds));
  ::kill(process, SIGKILL);
  expect_end(program);
  try {
    EXPECT_TRUE(client.next(os::Deadline(seconds(10))));
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("has ended before it answered"));
  }
  expect_same_losses(run);
}

INSTANTIATE_TEST_SUITE_P(Moments, KilledWhileScaling,
                         testing::Values(std::pair(0, 0), std::pair(1, 0), std::pair(3, 0), std::pair(1, 20),
                                         std::pair(1, 60), std::pair(0, 40)),
                         [](const auto& info) { return cat("Rank", info.param.first, "After", info.param.second); });

TEST_F(Scaling, ARankThatDiesInTheSaveOfItIsReplacedAmongAsManyAsBefore) {
  Program program = job_->start("crashed", with(4, {"recovery.replacements=3", "hybrid_shard_degree=2"}),
                                {{"TESSERAE_CRASH_AT", "data-synced@1#1"}});
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const auto [done, text] = scale("crashed", 2);
  EXPECT_FALSE(done) << text;
  expect_end(program);
  expect_same_losses("crashed");
  EXPECT_EQ(job_->summary("crashed")["world_size"], 4);
  EXPECT_THAT(job_->summary("crashed")["recoveries"], SizeIs(1));
}

TEST_F(Scaling, WhereNoProcessCanBeStartedTheJobGoesOnWithTheRanksThatItHas) {
  const std::string copy = job_->path("program");
  std::filesystem::copy(TESSERAE_PROGRAM, copy);
  std::vector<std::string> arguments = {copy, "train", job_->path("job.json"), "--set",
                                        "run.folder=" + job_->path("no-more")};
  const std::vector<std::string> more = with(4, {});
  arguments.insert(arguments.end(), more.begin(), more.end());
  Program program(arguments, {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  os::files().remove(copy);
  const auto [done, text] = scale("no-more", 8);
  EXPECT_FALSE(done);
  EXPECT_THAT(text, HasSubstr("the job keeps its 4 ranks: the launcher could not start others"));
  expect_end(program);
  EXPECT_THAT(program.errors, HasSubstr("the job keeps its 4 ranks, a new one cannot be started: "));
  expect_same_losses("no-more");
}

TEST_F(Scaling, LaterStepsOfAnotherRunInTheFolderAreNotTakenUp) {
  const std::string folder = "checkpoint.folder=" + job_->path("two-runs");
  job_->run("earlier-run", with(4, {folder, "checkpoint.every_steps=1000"}));
  Program program = job_->start("shares-folder", with(4, {folder, "checkpoint.every_steps=1000"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  expect_scaled("shares-folder", 4, 2);
  expect_end(program);
  expect_same_losses("shares-folder");
}

TEST_F(Scaling, WhatCanNotBeSavedKeepsItsRanksAndTrainingGoesOn) {
  Program program = job_->start("unsaved", with(4, {}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const std::string folder = job_->path("unsaved/checkpoints");
  ASSERT_FALSE(std::filesystem::exists(folder));
  os::files().write(folder, "no folder");
  const auto [done, text] = scale("unsaved", 2);
  EXPECT_FALSE(done);
  EXPECT_THAT(text, AllOf(HasSubstr("the job keeps its 4 ranks, not 2: "), HasSubstr(" was not saved")));
  os::files().remove(folder);
  expect_scaled("unsaved", 4, 2);
  expect_end(program);
  expect_same_losses("unsaved");
  EXPECT_THAT(job_->summary("unsaved")["scalings"], SizeIs(1));
}

TEST_F(Scaling, WithoutReplacementsALossWhileItScalesEndsTheJob) {
  Program program = job_->start("ends", with(4, {"run.deadline_seconds=20"}), {{"TESSERAE_CRASH_AT", "renamed@0#1"}});
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  EXPECT_THROW(scale("ends", 2), IoError);
  const auto exit = program.finish();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGKILL);
  EXPECT_THAT(program.errors, HasSubstr("rank 0 of 4 was killed by signal 9 (Killed); the other ranks were ended"));
  EXPECT_THAT(job_->steps("ends"), SizeIs(1)) << "from here it can go on, with any number of ranks";
}

}  // namespace
}  // namespace tesserae::train
