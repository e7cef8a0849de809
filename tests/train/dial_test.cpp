#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <string>
#include <vector>

#include "tesserae/dial/record.h"
#include "tests/train/train_job.h"

// The dial of `tesserae train`: real processes whose degrees change while they train.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const config::Json schedule =
    config::Json::parse(R"([{"step": 5, "hybrid_shard_degree": 4}, {"step": 9, "hybrid_shard_degree": 1},
    {"step": 13, "degrees": {"parameters": 1, "gradients": 2, "optimizer": 4}}, {"step": 18, "hybrid_shard_degree": 2}])");

class DialJob : public testing::Test {
 protected:
  std::vector<std::string> ranks(int count, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {"--nproc", std::to_string(count)};
    for (const std::string& assignment : more) all.insert(all.end(), {"--set", assignment});
    return all;
  }

  /// `tesserae dial` on the run folder of that name: its exit status and all that it wrote.
  std::pair<int, std::string> dial(const std::string& run, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {TESSERAE_PROGRAM, "dial", job_.path(run)});
    Program program(arguments);
    const auto exit = program.finish(seconds(100));
    return {exit ? exit->code : -1, program.output + program.errors};
  }

  void expect_same_losses(const std::string& run, const std::string& reference) const {
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(reference);
    ASSERT_EQ(lines.size(), expected.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      const double wanted = expected[i]["loss"];
      EXPECT_NEAR(lines[i]["loss"].get<double>(), wanted, 1e-5 * wanted) << "step " << i + 1;
    }
  }

  const TrainJob job_{"dial"};
};

// Over Gloo, so that there is something to round.
TEST_F(DialJob, WhatIsRoundedOnTheWireTrainsAndTurns) {
  const std::vector<std::string> plain = {"model.dropout=0", "hybrid_shard_degree=4", "run.backend=gloo"};
  job_.run("exact", ranks(4, plain));
  std::vector<std::string> rounded = plain;
  rounded.insert(rounded.end(), {"wire.parameters=int8", "wire.gradients=int8",
                                 R"(dial.schedule=[{"step": 8, "hybrid_shard_degree": 2}])"});
  job_.run("rounded", ranks(4, rounded));
  const std::vector<config::Json> lines = job_.metrics("rounded"), expected = job_.metrics("exact");
  ASSERT_EQ(lines.size(), expected.size());
  int different = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const double loss = lines[i]["loss"], wanted = expected[i]["loss"];
    EXPECT_NEAR(loss, wanted, 0.05 * wanted) << "step " << i + 1;
    different += loss != wanted;
  }
  EXPECT_GT(different, 12) << "something was rounded";
}

TEST_F(DialJob, TheScheduleChangesTheDegreesAndNotTheLosses) {
  const std::vector<std::string> plain = {"model.dropout=0", "hybrid_shard_degree=2"};
  job_.run("steady", ranks(4, plain));
  std::vector<std::string> dialed = plain;
  dialed.push_back("dial.schedule=" + schedule.dump());
  const std::string screen = job_.run("dialed", ranks(4, dialed));

  const std::vector<config::Json> lines = job_.metrics("dialed");
  ASSERT_EQ(lines.size(), 24u);
  for (const config::Json& line : lines) {
    const int64_t step = line["step"];
    const config::Json wanted = step <= 5    ? config::Json{2, 2, 2}
                                : step <= 9  ? config::Json{4, 4, 4}
                                : step <= 13 ? config::Json{1, 1, 1}
                                : step <= 18 ? config::Json{1, 2, 4}
                                             : config::Json{2, 2, 2};
    EXPECT_EQ(line["degrees"], wanted) << "step " << step;
    EXPECT_GT(line["memory_bytes"], 10'000'000);
  }
  EXPECT_GT(lines[11]["state_bytes"], lines[7]["state_bytes"]) << "replicas hold more than shards";
  expect_same_losses("dialed", "steady");

  EXPECT_THAT(screen, AllOf(HasSubstr("step 5: P=2 G=2 O=2 -> P=4 G=4 O=4 in "), HasSubstr(" MB moved (as scheduled)"),
                            HasSubstr("step 18: P=1 G=2 O=4 -> P=2 G=2 O=2 in ")));
  EXPECT_THAT(screen, Not(HasSubstr("the pool had no buffer")));
  const config::Json summary = job_.summary("dialed");
  EXPECT_EQ(summary["dial"]["changes"], 4);
  EXPECT_GT(summary["dial"]["seconds"], 0.0);
  EXPECT_GT(summary["dial"]["bytes_moved"], 0.0);
  EXPECT_EQ(summary["layout"], (config::Json{{"N", 4}, {"P", 2}, {"G", 2}, {"O", 2}}));
  EXPECT_EQ(job_.summary("steady")["dial"]["changes"], 0);
}

TEST_F(DialJob, AccumulationScalingAndOtherDtypesGoAlong) {
  const std::vector<std::string> plain = {"precision=bf16",     "hybrid_shard_degree=1", "train.accumulate=2",
                                          "optimizer.name=sgd", "optimizer.lr=0.1",      "run.backend=gloo"};
  std::vector<std::string> dialed = plain;
  dialed.push_back(R"(dial.schedule=[{"step": 6, "hybrid_shard_degree": 2}, {"step": 12, "hybrid_shard_degree": 1}])");
  job_.run("steady", ranks(2, plain));
  job_.run("dialed", ranks(2, dialed));
  const std::vector<config::Json> lines = job_.metrics("dialed"), expected = job_.metrics("steady");
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_NEAR(lines[i]["loss"].get<double>(), expected[i]["loss"].get<double>(), 2e-2) << "step " << i + 1;
  }
}

TEST_F(DialJob, CheckpointsAndSnapshotsInMemoryAreOfWhateverLayoutThereIs) {
  const std::vector<std::string> plain = {"hybrid_shard_degree=2", "checkpoint.every_steps=4",
                                          "checkpoint.memory_every_steps=3", "checkpoint.keep=0"};
  std::vector<std::string> dialed = plain;
  dialed.push_back("dial.schedule=" + schedule.dump());
  job_.run("steady", ranks(4, plain));
  job_.run("dialed", ranks(4, dialed));
  EXPECT_EQ(job_.steps("dialed"), (std::vector<int64_t>{4, 8, 12, 16, 20, 24}));
  expect_same_losses("dialed", "steady");
  // Continued in the middle: the schedule is taken up where it stands there.
  std::filesystem::remove_all(job_.path("dialed") + "/checkpoints/step-24");
  std::filesystem::remove_all(job_.path("dialed") + "/checkpoints/step-20");
  std::vector<std::string> again = ranks(4, dialed);
  again.insert(again.end(), {"--resume", "auto"});
  const std::string screen = job_.run("dialed", again);
  EXPECT_THAT(screen, HasSubstr("resumed at step 16"));
  EXPECT_THAT(screen, HasSubstr("step 17: P=2 G=2 O=2 -> P=1 G=2 O=4 in "));
  expect_same_losses("dialed", "steady");
}

TEST_F(DialJob, WrongSchedulesNameTheEntry) {
  const auto error = [&](const std::string& assignment) {
    Program program = job_.start("run", ranks(4, {assignment}));
    const auto exit = program.finish(seconds(60));
    EXPECT_EQ(exit ? exit->code : -1, 2);
    return program.errors;
  };
  EXPECT_THAT(error(R"(dial.schedule=[{"step": 2, "hybrid_shard_degree": 4}, {"step": 4, "hybrid_shard_degree": 3}])"),
              HasSubstr("dial.schedule[1].hybrid_shard_degree: hybrid_shard_degree=3 does not divide the 4 ranks; "
                        "nearest valid: 2, 4"));
}

/// A job that goes on until the test ends it.
class DialledJob : public DialJob {
 protected:
  Program start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {"train.steps=1000000", "optimizer.schedule=constant"};
    all.insert(all.end(), more.begin(), more.end());
    Program job = job_.start("run", ranks(2, all));
    EXPECT_TRUE(job.wait_for("step 5/", seconds(100))) << job.output << job.errors;
    return job;
  }
  void end(Program& job) const {
    job.process().signal(SIGTERM);
    const auto exit = job.finish(seconds(60));
    EXPECT_TRUE(exit.has_value()) << job.errors;
  }
};

TEST_F(DialledJob, IsTurnedFromOutside) {
  Program job = start({"hybrid_shard_degree=1"});
  const auto [shown, status] = dial("run", {});
  EXPECT_EQ(shown, 0) << status;
  EXPECT_THAT(status, AllOf(HasSubstr("P=1 G=1 O=1 on 2 ranks"), HasSubstr("ms a step"), HasSubstr("of memory free")));

  const auto [turned, text] = dial("run", {"--degree", "2"});
  EXPECT_EQ(turned, 0) << text;
  EXPECT_THAT(
      text, AllOf(HasSubstr("P=1 G=1 O=1 -> P=2 G=2 O=2 in "), HasSubstr(" MB moved"), HasSubstr("before the change")));
  EXPECT_TRUE(job.wait_for("(as requested)", seconds(20)));
  EXPECT_THAT(dial("run", {"--degrees", "1,1,2"}).second, HasSubstr("P=2 G=2 O=2 -> P=1 G=1 O=2 in "));
  EXPECT_THAT(dial("run", {"--degrees", "1,1,2"}).second, HasSubstr("P=1 G=1 O=2: as it was"));
  EXPECT_THAT(dial("run", {"--show"}).second, HasSubstr("(as requested)"));

  const auto [refused, why] = dial("run", {"--degree", "3"});
  EXPECT_EQ(refused, 1);
  EXPECT_THAT(why, HasSubstr("does not divide the 2 ranks; nearest valid: 2"));
  EXPECT_EQ(dial("run", {"--degree", "2", "--auto"}).first, 2) << "one thing at a time";

  const auto [automatic, given] = dial("run", {"--auto"});
  EXPECT_EQ(automatic, 0) << given;
  EXPECT_TRUE(job.wait_for("(auto; ", seconds(60))) << "a line with the reason: " << job.output;
  EXPECT_THAT(dial("run", {"--show"}).second, HasSubstr("auto: "));
  end(job);
  EXPECT_GE(job_.summary("run")["dial"]["changes"], 2);
  const auto [gone, ended] = dial("run", {"--degree", "1"});
  EXPECT_EQ(gone, 1);
  EXPECT_THAT(ended, HasSubstr("no run listens in"));
  EXPECT_THAT(dial("none", {"--show"}).second, HasSubstr("there is no run folder"));
}

TEST_F(DialledJob, StateGoesToADiskAndComesBack) {
  os::files().make_directories(job_.path("scratch"));
  Program job = start({"hybrid_shard_degree=1", "offload.folder=" + job_.path("scratch")});
  const auto [turned, text] = dial("run", {"--offload", "optimizer=disk"});
  EXPECT_EQ(turned, 0) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("P=1 G=1 O=1 -> P=1 G=1 O=1, optimizer on disk in "), HasSubstr(" 0.0 MB moved")));
  EXPECT_TRUE(job.wait_for("optimizer on disk: ", seconds(20))) << job.output;
  EXPECT_TRUE(job.wait_for("  disk ", seconds(20))) << "the live line says what travels: " << job.output;
  EXPECT_THAT(
      dial("run", {"--offload", "all=disk"}).second,
      HasSubstr("optimizer on disk -> P=1 G=1 O=1, parameters on disk, gradients on disk, optimizer on disk in "));
  EXPECT_THAT(dial("run", {"--auto"}).second, HasSubstr("bring the state back into memory first"));
  EXPECT_THAT(dial("run", {"--offload", "all=device"}).second, HasSubstr(" -> P=1 G=1 O=1 in "));
  EXPECT_THAT(dial("run", {"--show"}).second, HasSubstr("P=1 G=1 O=1 on 2 ranks"));
  EXPECT_EQ(dial("run", {"--offload", "optimiser=disk"}).first, 1);
  EXPECT_EQ(dial("run", {"--offload", "optimizer"}).first, 2);
  EXPECT_EQ(dial("run", {"--offload", "optimizer=disk", "--show"}).first, 2);
  end(job);
  const size_t steps = job_.metrics("run").size();
  job_.run("alone", ranks(2, {"hybrid_shard_degree=1", "optimizer.schedule=constant", cat("train.steps=", steps)}));
  job_.expect_same_history("run", "alone", steps);
}

TEST_F(DialledJob, ATierThatCannotBeHadIsRefusedAndTheRunGoesOn) {
  Program job = start({"hybrid_shard_degree=1", "offload.folder=/proc/nowhere"});
  const auto [refused, why] = dial("run", {"--offload", "optimizer=disk"});
  EXPECT_EQ(refused, 1);
  EXPECT_THAT(why, AllOf(HasSubstr("P=1 G=1 O=1, optimizer on disk cannot be had: "), HasSubstr("/proc/nowhere")));
  EXPECT_THAT(dial("run", {"--degree", "2"}).second, HasSubstr("P=1 G=1 O=1 -> P=2 G=2 O=2 in "));
  end(job);
}

TEST_F(DialledJob, DegreesAndTiersAreTurnedTogether) {
  os::files().make_directories(job_.path("scratch"));
  Program job = start({"hybrid_shard_degree=1", "offload.folder=" + job_.path("scratch")});
  const auto [turned, text] = dial("run", {"--degree", "2", "--offload", "gradients=disk,optimizer=disk"});
  EXPECT_EQ(turned, 0) << text;
  EXPECT_THAT(text, HasSubstr("P=1 G=1 O=1 -> P=2 G=2 O=2, gradients on disk, optimizer on disk in "));
  EXPECT_THAT(dial("run", {"--degree", "1"}).second,
              HasSubstr(" -> P=1 G=1 O=1, gradients on disk, optimizer on disk"));
  end(job);
}

TEST_F(DialledJob, AKilledRunLeavesASocketThatTheNextOneReplaces) {
  {
    Program job = start({"checkpoint.every_steps=5"});
    const std::vector<pid_t> started = children_of(job.process().id());
    job.process().signal_group(SIGKILL);
    for (const pid_t id : started) ::kill(id, SIGKILL);
    job.finish(seconds(60));
    for (const pid_t id : started) {
      for (const os::Deadline deadline(seconds(20)); os::start_time(id) && !deadline.passed();) {
        os::sleep_for(std::chrono::milliseconds(5));
      }
    }
  }
  ASSERT_TRUE(os::files().exists(job_.path("run") + "/dial.sock"));
  EXPECT_THAT(dial("run", {"--show"}).second, HasSubstr("no run listens in"));
  std::vector<std::string> again = ranks(2, {"train.steps=1000000", "checkpoint.every_steps=5"});
  again.insert(again.end(), {"--resume", "auto"});
  Program next = job_.start("run", again);
  EXPECT_TRUE(next.wait_for("  loss ", seconds(100))) << next.output << next.errors;
  const auto [shown, status] = dial("run", {"--show"});
  EXPECT_EQ(shown, 0) << status;
  end(next);
  EXPECT_FALSE(os::files().exists(job_.path("run") + "/dial.sock"));
}

TEST_F(DialledJob, AWaitThatIsTooShortSaysSo) {
  Program job = start();
  const std::vector<pid_t> started = children_of(job.process().id());
  for (const pid_t id : started) ::kill(id, SIGSTOP);  // nobody answers
  const auto [status, text] = dial("run", {"--degree", "1", "--wait", "0.5"});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(text, HasSubstr("has not answered within 0.5 s"));
  for (const pid_t id : started) ::kill(id, SIGCONT);
  end(job);
}

TEST_F(DialJob, AutoChoosesAndSaysWhy) {
  const std::string screen =
      job_.run("auto", ranks(4, {"hybrid_shard_degree=auto", "train.steps=80", "model.dropout=0"}));
  EXPECT_THAT(screen, HasSubstr("(auto; estimated to be fastest of what fits: "));
  EXPECT_THAT(screen, HasSubstr("measured (predicted): "));
  const dial::Replay replayed = dial::replay(os::files().read(job_.path("auto") + "/dial.jsonl"));
  ASSERT_EQ(replayed.recorded.size(), 80u);
  for (size_t i = 0; i < replayed.recorded.size(); ++i) {
    const auto &was = replayed.recorded[i].decision, &is = replayed.decided[i];
    ASSERT_EQ(was.has_value(), is.has_value()) << "step " << i + 1;
    if (was) {
      EXPECT_EQ(was->degrees, is->degrees) << "step " << i + 1;
    }
  }
  const config::Json summary = job_.summary("auto");
  EXPECT_LE(summary["dial"]["steps_spent_on_trying"], 25.0);
  job_.run("steady", ranks(4, {"hybrid_shard_degree=4", "train.steps=80", "model.dropout=0"}));
  expect_same_losses("auto", "steady");
}

}  // namespace
}  // namespace tesserae::train
