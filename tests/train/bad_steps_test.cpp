#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/train/train_job.h"

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::SizeIs;

/// Two ranks that read a sample each. The text has a few stretches that look like nothing else.
class BadStepsOfAJob : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("bad-steps");
    std::string text = os::files().read(job_->path("text.txt"));
    std::mt19937 random(3);  // NOLINT: the same text each time
    for (size_t sample = 0; sample < text.size() / 32; sample += 40 + random() % 10) {
      for (size_t i = 0; i < 32; ++i) text[sample * 32 + i] = static_cast<char>(1 + random() % 31);
    }
    os::files().write(job_->path("text.txt"), text);
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static std::vector<std::string> with(const std::vector<std::string>& settings) {
    std::vector<std::string> arguments = {
        "--nproc",         "2",     "--set",          "train.batch_per_rank=1", "--set", "train.accumulate=1", "--set",
        "model.dropout=0", "--set", "train.steps=120"};
    for (const std::string& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }

  /// Expects that the run fails. What it wrote to standard error.
  static std::string fails(const std::string& run, const std::vector<std::string>& settings) {
    Program program = job_->start(run, with(settings));
    const auto exit = program.finish(seconds(200));
    EXPECT_TRUE(exit && exit->signal == 0 && exit->code == 1) << program.output << program.errors;
    return program.errors;
  }

  static TrainJob* job_;
};

TrainJob* BadStepsOfAJob::job_ = nullptr;

TEST_F(BadStepsOfAJob, SpikesAreSkipped) {
  job_->run("skip", with({"bad_steps.loss_spike=1.6", "bad_steps.policy=skip"}));
  const config::Json found = job_->summary("skip")["bad_steps"];
  ASSERT_GT(found.size(), 2);
  std::vector<int64_t> skipped, told;
  for (const config::Json& line : job_->metrics("skip")) {
    EXPECT_EQ(line.contains("bad"), line.contains("skipped"));
    if (line.contains("bad")) skipped.push_back(line["step"]);
  }
  for (const config::Json& entry : found) {
    EXPECT_EQ(entry["then"], "skipped");
    told.push_back(entry["step"]);
  }
  EXPECT_EQ(told, skipped);
  EXPECT_THAT(job_->metrics("skip"), SizeIs(120));
}

TEST_F(BadStepsOfAJob, ARollbackTakesTheSnapshotAndLeavesOutTheData) {
  const std::vector<std::string> settings = {"bad_steps.loss_spike=1.6", "bad_steps.policy=rollback",
                                             "checkpoint.memory_every_steps=4"};
  const std::string output = job_->run("back", with(settings));
  const config::Json found = job_->summary("back")["bad_steps"];
  ASSERT_GT(found.size(), 2);
  const std::vector<config::Json> lines = job_->metrics("back");
  ASSERT_THAT(lines, SizeIs(120));
  int64_t samples = 0;
  for (const config::Json& entry : found) {
    EXPECT_EQ(entry["then"], "rolled back");
    const int64_t to = entry["to"], from = entry["step"];
    EXPECT_EQ(to, (from - 1) / 4 * 4);
    samples += 2 * (from - to);
    EXPECT_THAT(output, HasSubstr(cat(": back to step ", to, " from memory")));
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i]["step"], i + 1);
    EXPECT_FALSE(lines[i].contains("bad"));
  }
  EXPECT_EQ(lines[found.back()["to"].get<size_t>()]["rolled_back_from"], found.back()["step"]);
  // What was read and undone is not read again: the position is as many samples further as were left out.
  const checkpoint::Checkpoint end = job_->open("back", 120);
  const config::Json data = end.manifest().training["data"];
  EXPECT_EQ(data["epoch"].get<int64_t>() * data["samples"].get<int64_t>() + data["offset"].get<int64_t>(),
            2 * 120 + samples);
  EXPECT_EQ(end.manifest().training["bad_steps"]["rollbacks"], found.size());
  // The same again, without any memory: from checkpoints, of which one may be on its way when the run goes back.
  job_->run("back-2", with({"bad_steps.loss_spike=1.6", "bad_steps.policy=rollback", "checkpoint.every_steps=4",
                            "checkpoint.keep=1"}));
  job_->expect_same_history("back-2", "back", 120);
}

TEST_F(BadStepsOfAJob, RollbacksHaveALimit) {
  const std::string errors = fails("limit", {"bad_steps.loss_spike=1.6", "bad_steps.policy=rollback",
                                             "bad_steps.limit=2", "checkpoint.memory_every_steps=4"});
  EXPECT_THAT(errors, HasSubstr("gone back 2 times"));
  EXPECT_THAT(job_->summary("limit")["bad_steps"], SizeIs(3));
}

TEST_F(BadStepsOfAJob, ARunThatDivergesEndsWithWhatItHas) {
  // The first update makes nonsense of all parameters.
  std::string errors = fails("stop", {"optimizer.lr=1e30", "bad_steps.policy=stop", "checkpoint.every_steps=50"});
  EXPECT_THAT(errors, HasSubstr("step 2: the "));
  EXPECT_THAT(errors, HasSubstr("not finite ("));
  EXPECT_THAT(errors, HasSubstr("--resume auto"));
  EXPECT_EQ(job_->steps("stop"), std::vector<int64_t>{2});
  EXPECT_THAT(job_->summary("stop")["broken_off"].get<std::string>(), HasSubstr("step 2: the "));
  // By default that many steps are left out before; a restart of the launcher's does not help, and none is tried.
  errors = fails("in-a-row", {"optimizer.lr=1e30", "bad_steps.limit=3", "recovery.replacements=3"});
  EXPECT_THAT(errors, HasSubstr("that makes 3 bad steps in a row"));
  EXPECT_THAT(errors, HasSubstr("nothing is saved"));
  EXPECT_THAT(errors, testing::Not(HasSubstr("takes its place")));
}

TEST_F(BadStepsOfAJob, AnEndThatCannotBeSavedIsNotSaidToBe) {
  Program program = job_->start(
      "unsaved", with({"optimizer.lr=1e30", "bad_steps.limit=150", "train.steps=1000", "checkpoint.every_steps=1000"}));
  ASSERT_TRUE(program.wait_for("nothing was updated")) << program.output << program.errors;
  const std::string checkpoints = job_->path("unsaved/checkpoints");
  os::files().remove_all(checkpoints);
  os::files().write(checkpoints, "no directory");
  const auto exit = program.finish(seconds(200));
  EXPECT_TRUE(exit && exit->signal == 0 && exit->code == 1) << program.output << program.errors;
  EXPECT_THAT(program.errors, HasSubstr("that makes 150 bad steps in a row"));
  EXPECT_THAT(program.errors, HasSubstr("the state before it is not saved: "));
  EXPECT_THAT(program.errors, testing::Not(HasSubstr("--resume auto")));
}

TEST_F(BadStepsOfAJob, ATurnOfTheDialThatFallsOnABadStepIsDone) {
  const std::string schedule = R"(dial.schedule=[{"step": %, "hybrid_shard_degree": 1}])";
  job_->run("undialed", with({"bad_steps.loss_spike=1.6", "bad_steps.policy=rollback", "train.steps=80",
                              "checkpoint.memory_every_steps=4", "hybrid_shard_degree=2"}));
  const int64_t bad = job_->summary("undialed")["bad_steps"].at(0)["step"];
  std::string at_it = schedule;
  at_it.replace(at_it.find('%'), 1, std::to_string(bad));
  job_->run("dialed", with({"bad_steps.loss_spike=1.6", "bad_steps.policy=rollback", "train.steps=80",
                            "checkpoint.memory_every_steps=4", "hybrid_shard_degree=2", at_it}));
  EXPECT_EQ(job_->summary("dialed")["bad_steps"].at(0)["step"], bad);
  const std::vector<config::Json> lines = job_->metrics("dialed");
  EXPECT_NE(lines.front()["degrees"], lines.back()["degrees"]);
}

TEST_F(BadStepsOfAJob, HalfPrecisionMayOverflow) {
  job_->run("fp16", with({"precision=fp16", "bad_steps.policy=stop", "train.steps=20"}));
  EXPECT_FALSE(job_->summary("fp16").contains("bad_steps"));
}

}  // namespace
}  // namespace tesserae::train
