#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/os/port.h"
#include "tests/train/train_job.h"

// Jobs that lose ranks which nobody replaces, and go on with fewer: real processes, real signals. What is compared is a
// run of the same job whose ranks all live; without dropout, whose masks belong to ranks.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr size_t steps = 60;

class FewerRanks : public testing::Test {
 protected:
  static void SetUpTestSuite() { job_ = new TrainJob("fewer-ranks"); }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  /// Of four ranks, with 24 samples a step: they can be three.
  static std::vector<std::string> with(std::vector<std::string> settings) {
    std::vector<std::string> arguments = {"--nproc", "4"};
    settings.insert(settings.begin(), {cat("train.steps=", steps), "model.dropout=0", "optimizer.lr=1e-3",
                                       "train.batch_per_rank=3", "train.eval_batches=2", "recovery.min_ranks=1"});
    for (const std::string& setting : settings) arguments.insert(arguments.end(), {"--set", setting});
    return arguments;
  }

  /// The n-th of the processes that are left, in the order of their numbers.
  static pid_t process_of(Program& program, size_t rank) {
    std::vector<pid_t> processes;
    for (const auto& [launched, process] : ranks_of(program)) processes.push_back(process);
    EXPECT_LT(rank, processes.size());
    return rank < processes.size() ? processes[rank] : -1;
  }

  static void lose(Program& program, size_t rank, int number = SIGKILL) {
    if (const pid_t process = process_of(program, rank); process > 0) ::kill(process, number);
  }

  static void expect_end(Program& program) {
    const auto exit = program.finish(seconds(200));
    EXPECT_TRUE(exit && exit->success()) << (exit ? exit->text() : "it hangs") << program.output << program.errors;
  }

  static void expect_same_losses(const std::string& run, const std::string& reference, double difference = 1e-6) {
    ASSERT_THAT(job_->metrics(run), SizeIs(job_->metrics(reference).size()));
    EXPECT_LT(job_->difference_in_history(run, reference), difference);
    const double loss = job_->summary(run)["val_loss"], wanted = job_->summary(reference)["val_loss"];
    EXPECT_NEAR(loss, wanted, difference * wanted);
  }

  /// Trains with `settings` and `victims` killed one after the other, each some steps later: of those that are left
  /// then, the number. Expects the losses of an undisturbed run.
  static std::string disturbed(const std::string& name, const std::vector<std::string>& settings,
                               const std::vector<size_t>& victims, int number = SIGKILL, double difference = 1e-6) {
    const std::string alone = job_->reference(with(settings));
    Program program = job_->start(name, with(settings));
    for (size_t i = 0; i < victims.size(); ++i) {
      EXPECT_TRUE(program.wait_for(cat("step ", 8 + 8 * i, "/"))) << program.output << program.errors;
      lose(program, victims[i], number);
      EXPECT_TRUE(program.wait_for(cat(4 - i, " -> "))) << program.output << program.errors;
    }
    expect_end(program);
    expect_same_losses(name, alone, difference);
    return program.output + program.errors;
  }

  static void expect_numbers(const std::string& name, const std::vector<int>& numbers) {
    const config::Json found = job_->summary(name)["scalings"];
    ASSERT_THAT(found, SizeIs(numbers.size() - 1));
    for (size_t i = 0; i + 1 < numbers.size(); ++i) {
      EXPECT_EQ(found[i]["from"], numbers[i]);
      EXPECT_EQ(found[i]["to"], numbers[i + 1]);
      EXPECT_FALSE(found[i].contains("back")) << "no step was lost";
    }
    EXPECT_EQ(job_->summary(name)["world_size"], numbers.back());
  }

  static TrainJob* job_;
};

TrainJob* FewerRanks::job_ = nullptr;

TEST_F(FewerRanks, OneAfterTheOtherIsLostUntilOneIsLeft) {
  disturbed("down", {"hybrid_shard_degree=1"}, {2, 0, 1});
  expect_numbers("down", {4, 3, 2, 1});
  const std::vector<config::Json> lines = job_->metrics("down");
  EXPECT_EQ(lines.front()["ranks"], 4);
  EXPECT_EQ(lines.back()["ranks"], 1);
}

TEST_F(FewerRanks, TheOthersKeepTheirProcesses) {
  Program program = job_->start("kept", with({"hybrid_shard_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  std::vector<pid_t> before = children_of(program.process().id());
  const pid_t lost = process_of(program, 1);
  ::kill(lost, SIGKILL);
  ASSERT_TRUE(program.wait_for("4 -> 3 ranks, 3 were left, in ")) << program.output << program.errors;
  std::erase(before, lost);
  EXPECT_EQ(children_of(program.process().id()), before);
  expect_end(program);
  EXPECT_THAT(program.errors, HasSubstr("rank 1 of 4 was killed by signal 9 (Killed); none takes its place"));
  EXPECT_EQ(job_->summary("kept")["layout"]["O"], 3) << "the nearest to 2";
}

/// What the ranks that are left hold together, in whatever layout; 16 samples a step are no multiple of 3, so one of
/// them has no place any more.
struct Settings {
  const char* name;
  std::vector<std::string> settings;
  double difference = 1e-6;  ///< of losses to the end
};

class Layouts : public FewerRanks, public testing::WithParamInterface<Settings> {};

TEST_P(Layouts, NoStepIsLost) {
  const auto& [name, settings, difference] = GetParam();
  std::vector<std::string> all = settings;
  all.emplace_back("train.batch_per_rank=2");
  all.emplace_back("monitor.port=0");
  const std::string run = cat("layout-", name);
  const std::string said = disturbed(run, all, {0}, SIGKILL, difference);
  EXPECT_NE(said.find("page: http://"), said.rfind("page: http://")) << "rank 0 has served it, another one does now";
  expect_numbers(run, {4, 2});
  const size_t step = job_->summary(run)["scalings"][0]["step"];
  EXPECT_LT(job_->difference_in_history(run, job_->reference(with(all)), step + 5), std::min(difference, 1e-5));
}

// Rounding makes another choice of experts here and there, as `tesserae scale` does.
INSTANTIATE_TEST_SUITE_P(
    Some, Layouts,
    testing::Values(Settings{"ShardedOverTwo", {"hybrid_shard_degree=2"}},
                    Settings{"Unequal", {R"(degrees={"parameters": 1, "gradients": 2, "optimizer": 2})"}},
                    Settings{
                        "MixedPrecision",
                        {"hybrid_shard_degree=2", "precision=fp16", "optimizer.name=sgd", "optimizer.momentum=0.9"},
                        1e-4},
                    Settings{"SplitLayers", {"hybrid_shard_degree=1", "tensor_parallel_degree=2"}},
                    Settings{"CutSequences", {"hybrid_shard_degree=2", "context_parallel_degree=2"}},
                    Settings{"Experts",
                             {"hybrid_shard_degree=1", "expert_parallel_degree=2", "model.experts=4",
                              "model.experts_per_token=2", "model.bias_rate=0.01"},
                             1e-2},
                    Settings{"Disk", {"hybrid_shard_degree=2", "offload.optimizer=disk"}},
                    Settings{"Gloo", {"hybrid_shard_degree=2", "run.backend=gloo"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(FewerRanks, TwoAtOnce) {
  Program program = job_->start("two", with({"hybrid_shard_degree=1"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  const pid_t first = process_of(program, 0), second = process_of(program, 3);
  ::kill(first, SIGKILL);
  ::kill(second, SIGKILL);
  expect_end(program);
  expect_same_losses("two", job_->reference(with({"hybrid_shard_degree=1"})));
  EXPECT_EQ(job_->summary("two")["world_size"], 2);
}

TEST_F(FewerRanks, AnotherOneWhileTheyGoOn) {
  for (const int milliseconds : {20, 80, 140, 200, 300}) {
    const std::string run = cat("while-", milliseconds);
    Program program = job_->start(run, with({"hybrid_shard_degree=1", "run.deadline_seconds=20"}));
    ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
    const pid_t first = process_of(program, 1), second = process_of(program, 0);
    ::kill(first, SIGKILL);
    os::sleep_for(std::chrono::milliseconds(milliseconds));
    ::kill(second, SIGKILL);
    expect_end(program);
    expect_same_losses(run, job_->reference(with({"hybrid_shard_degree=1"})));
    EXPECT_EQ(job_->summary(run)["world_size"], 2);
  }
}

TEST_F(FewerRanks, WithoutReplicasFromSnapshotsInMemory) {
  disturbed("memory", {"hybrid_shard_degree=4", "checkpoint.memory_every_steps=1"}, {2, 1});
  const config::Json found = job_->summary("memory")["scalings"];
  ASSERT_THAT(found, SizeIs(2));
  for (const config::Json& scaling : found) EXPECT_THAT(scaling["back"].get<std::string>(), HasSubstr("step-"));
  EXPECT_GE(found[0]["step"].get<int>(), 6) << "of the last steps";
}

TEST_F(FewerRanks, WithoutSnapshotsFromTheNewestCheckpoint) {
  disturbed("stored", {"hybrid_shard_degree=4", "checkpoint.every_steps=5", "checkpoint.async=false"}, {0, 2});
  EXPECT_EQ(job_->summary("stored")["scalings"][0]["step"].get<int>() % 5, 0);
}

TEST_F(FewerRanks, BeforeTheFirstCheckpointFromTheBeginning) {
  disturbed("early", {"hybrid_shard_degree=4", "checkpoint.every_steps=1000"}, {3});
  EXPECT_EQ(job_->summary("early")["scalings"][0]["step"], 0);
}

TEST_F(FewerRanks, SavesAtEachStepAndAScheduleOfTheDial) {
  disturbed("saving",
            {"hybrid_shard_degree=2", "checkpoint.every_steps=1", "checkpoint.keep=2",
             R"(dial.schedule=[{"step": 4, "hybrid_shard_degree": 1}, {"step": 40, "hybrid_shard_degree": 4}])"},
            {1});
  expect_numbers("saving", {4, 3});
  EXPECT_EQ(job_->metrics("saving")[30]["degrees"], config::Json({1, 1, 1})) << "what it was turned to";
  EXPECT_EQ(job_->metrics("saving")[41]["degrees"], config::Json({3, 3, 3})) << "the nearest to 4";
}

TEST_F(FewerRanks, ARankThatIsStoppedForTooLong) {
  disturbed("stopped", {"hybrid_shard_degree=1", "run.deadline_seconds=8"}, {1}, SIGSTOP);
  expect_numbers("stopped", {4, 3});
}

TEST_F(FewerRanks, ReplacementsComeFirst) {
  Program program = job_->start("first", with({"hybrid_shard_degree=1", "recovery.replacements=1"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  lose(program, 1);
  ASSERT_TRUE(program.wait_for("place of rank 1")) << program.output << program.errors;
  lose(program, 1);
  expect_end(program);
  expect_same_losses("first", job_->reference(with({"hybrid_shard_degree=1"})));
  EXPECT_THAT(job_->summary("first")["recoveries"], SizeIs(1));
  EXPECT_EQ(job_->summary("first")["world_size"], 3);
}

TEST_F(FewerRanks, MoreAgainOnceThereAreProcesses) {
  const std::string alone = job_->reference(with({"hybrid_shard_degree=1", "train.steps=160"}));
  Program program = job_->start("more", with({"hybrid_shard_degree=1", "train.steps=160"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  lose(program, 0);
  ASSERT_TRUE(program.wait_for("4 -> 3 ranks")) << program.output << program.errors;
  const dial::Json event = job_->ask("more", {{"ask", "scale"}, {"ranks", 4}});
  EXPECT_EQ(event["event"], "scaled") << event;
  const std::vector<pid_t> processes = children_of(program.process().id());
  const pid_t newest = *std::ranges::max_element(processes, {}, [](pid_t process) { return os::start_time(process); });
  EXPECT_THAT(os::files().read(cat("/proc/", newest, "/environ")), HasSubstr(std::string("LOCAL_RANK=0\0", 13)))
      << "the accelerator that is free: the others keep theirs";
  expect_end(program);
  EXPECT_LT(job_->difference_in_history("more", alone), 1e-5);
  expect_numbers("more", {4, 3, 4});
}

TEST_F(FewerRanks, WhoeverIsFirstNowHearsThatTheRunIsToEnd) {
  const std::string file = job_->path("end");
  Program program = job_->start("asked", with({"hybrid_shard_degree=1", "train.steps=100000", "preemption.file=" + file,
                                               "preemption.every_seconds=0.1", "checkpoint.every_steps=1000000"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.output << program.errors;
  lose(program, 0);
  ASSERT_TRUE(program.wait_for("4 -> 3 ranks")) << program.output << program.errors;
  os::files().write(file, "");
  expect_end(program);
  EXPECT_THAT(job_->steps("asked"), testing::Not(IsEmpty()));
}

TEST_F(FewerRanks, ANumberThatCannotBeIsAnErrorThatSaysSo) {
  Program program = job_->start("axes", with({"tensor_parallel_degree=2", "context_parallel_degree=2"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  lose(program, 1);
  EXPECT_EQ(program.finish()->code, 3);
  EXPECT_THAT(program.errors, AllOf(HasSubstr("the job can have none of 1 to 3 ranks: a job with these axes has a "
                                              "multiple of 4 ranks, not 3; nearest possible: 4"),
                                    HasSubstr("recovery.min_ranks is 1")));
}

/// Each host's launcher reads a configuration of its own.
TEST_F(FewerRanks, HostsThatAreToldDifferentThingsAreToldSo) {
  const std::array<std::string, 3> cases[] = {{"recovery.min_ranks", "1", "0"},
                                              {"recovery.min_ranks", "0", "1"},
                                              {"random_seed", "1", "3"},  // both would train
                                              {"model.rope_base", "10000.0", "10.0"},
                                              {"precision", "fp32", "bf16"}};
  for (const auto& [key, first, second] : cases) {
    const std::string port = std::to_string(os::free_port());
    const auto start = [&](const char* host, const std::string& value) {
      return job_->start(
          "told", {"--nproc", "1", "--set", cat(key, "=", value)},
          {{"PET_NNODES", "2"}, {"PET_NODE_RANK", host}, {"MASTER_ADDR", "127.0.0.2"}, {"MASTER_PORT", port}});
    };
    Program one = start("0", first), other = start("1", second);
    for (Program* program : {&one, &other}) {
      const auto exit = program->finish();
      ASSERT_TRUE(exit.has_value()) << program->output << program->errors;
      EXPECT_EQ(exit->code, 2) << program->errors;
      EXPECT_THAT(program->errors, AllOf(HasSubstr(cat(key, ": host ")), HasSubstr(" (rank 0) has "),
                                         HasSubstr(": start all hosts with the same")));
    }
  }
}

/// The launcher that decides is gone with its ranks; the other host's takes over, and its ranks go on in their
/// processes. Also where that launcher has heard nothing of the run, which has just begun.
class FirstOfTwoHosts : public FewerRanks, public testing::WithParamInterface<const char*> {};

TEST_P(FirstOfTwoHosts, IsLost) {
  const bool has_heard = std::string_view(GetParam()) == "later";
  const std::string shared = job_->path(cat("shared-", GetParam())), port = std::to_string(os::free_port());
  os::files().make_directories(shared);
  const std::vector<std::string> settings = {"hybrid_shard_degree=2", "train.steps=160"};
  const std::string alone = job_->reference(with(settings));
  std::vector<std::string> arguments = with({settings[0], settings[1], "recovery.shared=" + shared});
  arguments[1] = "2";
  const auto start = [&](const char* host) {
    return job_->start(GetParam(), arguments,
                       {{"PET_NNODES", "2"},
                        {"PET_NODE_RANK", host},
                        {"MASTER_ADDR", "127.0.0.2"},
                        {"MASTER_PORT", port},
                        {"TESSERAE_LOG", "info"}});
  };
  Program first = start("0"), second = start("1");
  std::vector<pid_t> held;
  if (!has_heard) {
    const os::Deadline deadline(seconds(60));
    while (held.empty() && !deadline.passed()) held = children_of(first.process().id());
    ASSERT_FALSE(held.empty()) << first.errors;
    ::kill(held.front(), SIGSTOP);  // a rank without which the run does not begin
  }
  ASSERT_TRUE(second.wait_for("this host may take over")) << second.errors;
  if (!has_heard) {
    second.process().signal(SIGSTOP);
    ::kill(held.front(), SIGCONT);
  }
  ASSERT_TRUE(first.wait_for("step 8/")) << first.output << first.errors;
  const std::vector<pid_t> before = children_of(second.process().id());
  first.process().signal(SIGKILL);
  ASSERT_TRUE(first.finish().has_value());
  if (!has_heard) second.process().signal(SIGCONT);
  ASSERT_TRUE(second.wait_for("host 1 decides from now on, and 2 ranks are left")) << second.errors;
  ASSERT_TRUE(second.wait_for("4 -> 2 ranks")) << second.output << second.errors;
  EXPECT_EQ(children_of(second.process().id()), before);
  expect_end(second);
  expect_same_losses(GetParam(), alone);
  expect_numbers(GetParam(), {4, 2});
  EXPECT_THAT(os::files().list(shared), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Lost, FirstOfTwoHosts, testing::Values("later", "unheard"),
                         [](const auto& info) { return info.param == std::string("later") ? "Later" : "Unheard"; });

/// Before it has done a step there is nothing to lose, although no rank has a copy of what another one holds.
TEST_F(FewerRanks, WhileTheRunBegins) {
  const std::string alone = job_->reference(with({"hybrid_shard_degree=4"}));
  for (const std::string at : {"run-begins", "run-begun"}) {
    Program program = job_->start(at, with({"hybrid_shard_degree=4"}), {{"TESSERAE_CRASH_AT", at + "@3"}});
    expect_end(program);
    expect_same_losses(at, alone);
    EXPECT_EQ(job_->summary(at)["world_size"], 3);
    EXPECT_EQ(job_->summary(at)["scalings"].size(), at == "run-begun" ? 1u : 0u) << "of a run that had begun";
  }
}

/// All have finished step 40, and nobody has written what it was. Whoever is rank 0 then passes fewer than 40.
TEST_F(FewerRanks, AStepWhoseLineNobodyHasWritten) {
  const std::vector<std::string> settings = with({"hybrid_shard_degree=1"});
  Program program = job_->start("line", settings, {{"TESSERAE_CRASH_AT", "before-line@0#40"}});
  expect_end(program);
  expect_same_losses("line", job_->reference(settings));
}

TEST_F(FewerRanks, BelowTheLeastALossEndsTheJob) {
  Program program = job_->start("least", with({"hybrid_shard_degree=1", "recovery.min_ranks=3"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  lose(program, 3);
  ASSERT_TRUE(program.wait_for("4 -> 3 ranks")) << program.output << program.errors;
  lose(program, 1);
  EXPECT_EQ(program.finish()->code, 128 + SIGKILL);
  EXPECT_THAT(program.errors, HasSubstr("rank 1 of 3 was killed by signal 9 (Killed); the other ranks were ended"));
}

TEST_F(FewerRanks, WithoutAnyCopyTheJobEndsAndSaysWhatWouldHaveHelped) {
  Program program = job_->start("nothing", with({"hybrid_shard_degree=4"}));
  ASSERT_TRUE(program.wait_for("step 8/")) << program.errors;
  // By way of the launcher, as all that ranks write there: it may come later.
  ASSERT_TRUE(program.wait_for("nothing is saved: the loss of one will end the job")) << program.errors;
  lose(program, 1);
  EXPECT_EQ(program.finish()->code, 3);
  EXPECT_THAT(program.errors, AllOf(HasSubstr("no other rank has a copy, and nothing was saved"),
                                    HasSubstr("checkpoint.memory_every_steps")));
}

}  // namespace
}  // namespace tesserae::train
