#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/train_job.h"

// `tesserae train` with activations that leave between forward and backward: the same numbers, to the bit.

namespace tesserae::train {
namespace {

using testing::HasSubstr;

class ActivationsJob : public testing::Test {
 protected:
  /// On 2 ranks, with blocks whose inputs are 2 MiB in fp32.
  std::vector<std::string> arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"--nproc", "2"};
    std::vector<std::string> settings = {"train.steps=3",           "train.batch_per_rank=4", "train.accumulate=2",
                                         "train.eval_batches=0",    "model.layers=3",         "model.dimension=256",
                                         "data.sequence_length=512"};
    settings.insert(settings.end(), more.begin(), more.end());
    for (const std::string& setting : settings) all.insert(all.end(), {"--set", setting});
    return all;
  }

  /// Of rank 0, in a run that is compared with the same one whose activations stay.
  config::Json expect_same_losses(const std::string& name, std::vector<std::string> settings) {
    job_.run(name + "-stays", arguments(settings));
    settings.push_back("offload.activations=true");
    screen_ = job_.run(name, arguments(settings));
    job_.expect_same_history(name, name + "-stays", 3);
    return job_.summary(name)["activations"];
  }

  TrainJob job_{"activations"};
  std::string screen_;
};

// What a recomputed block saves is its input. The horizon of two units keeps what the head and the last norm save, from
// the second forward on.
TEST_F(ActivationsJob, WhatLeavesIsWhatWasSaid) {
  const std::vector<std::string> settings = {"model.checkpoint_activations=true", "precision=fp32"};
  const config::Json counted = expect_same_losses("recomputed", settings);
  EXPECT_THAT(screen_, HasSubstr("activations: 12 MB a step to disk ("));
  EXPECT_THAT(screen_, HasSubstr(") and back, 2 units ahead"));
  EXPECT_EQ(counted["in"], counted["out"]);
  job_.run("shorter", arguments({settings[0], settings[1], "offload.activations=true", "train.steps=2"}));
  const double input = 4 * 512 * 256 * 4, expected = 2 * 3 * input;
  const double of_a_step = counted["out"].get<double>() - job_.summary("shorter")["activations"]["out"].get<double>();
  EXPECT_NEAR(of_a_step, expected, 0.03 * expected);
}

TEST_F(ActivationsJob, EverythingThatBlocksSave) {
  const config::Json counted =
      expect_same_losses("whole", {"precision=bf16", "activation_loading_horizon=1", "train.accumulate=1"});
  EXPECT_GT(counted["out"].get<double>(), 25 << 20);
  EXPECT_THAT(screen_, HasSubstr(") and back, 1 unit ahead"));
}

// What is said before the first step, against what a step moves once the order of units is known.
TEST_F(ActivationsJob, TheForecastIsWithinThreePercent) {
  const std::vector<std::vector<std::string>> cases = {
      {"precision=fp32"},
      {"precision=bf16", "activation_loading_horizon=1"},
      {"precision=fp32", "model.tied=true", "activation_loading_horizon=3"},
      {"precision=fp32", "model.dropout=0", "model.kv_heads=1"},
      {"precision=bf16", "model.checkpoint_activations=true", "model.layers=5"},
      {"precision=fp32", "tensor_parallel_degree=2"},
      {"precision=fp32", "offload.activation_size=3MiB", R"(offload.activation_units=["blocks.0", "blocks.1*"])",
       "activation_loading_horizon=1", "train.batch_per_rank=4"},
      {"precision=fp32", "context_parallel_degree=2", "model.dropout=0"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cat("case ", i));
    std::vector<std::string> settings = {"offload.activations=true", "train.accumulate=1", "train.batch_per_rank=1",
                                         "offload.activation_size=128KiB"};
    settings.insert(settings.end(), cases[i].begin(), cases[i].end());
    const auto out = [&](int64_t steps) {
      std::vector<std::string> all = settings;
      all.push_back(cat("train.steps=", steps));
      const std::string name = cat("forecast-", i, "-", steps);
      screen_ = job_.run(name, arguments(all));
      return job_.summary(name)["activations"]["out"].get<double>();
    };
    const double measured = out(3) - out(2);
    const size_t begin = screen_.find("activations: ") + std::string("activations: ").size();
    ASSERT_LT(screen_.find("activations: "), screen_.find("step 1/")) << "before the first step";
    const double said = std::atof(screen_.c_str() + begin) * (1 << 20);
    EXPECT_GT(measured, 0);
    EXPECT_NEAR(said, measured, 0.03 * measured + (1 << 19));  // and rounded to 1 MB
    EXPECT_THAT(screen_, testing::Not(HasSubstr("as the first one shows")));
  }
}

TEST_F(ActivationsJob, AFolderThatCannotBeUsedEndsTheRunBeforeItBegins) {
  Program program = job_.start("nowhere", arguments({"offload.activations=true", "offload.folder=/proc/nowhere"}));
  const auto exit = program.finish();
  ASSERT_TRUE(exit && !exit->success());
  EXPECT_THAT(program.errors, HasSubstr("/proc/nowhere"));
  EXPECT_THAT(program.output, testing::Not(HasSubstr("step 1/")));
}

TEST_F(ActivationsJob, NamesThatFitNoUnitEndTheRunBeforeItBegins) {
  Program program = job_.start(
      "misnamed", arguments({"offload.activations=true", R"(offload.activation_units=["blocks.0", "layers.*"])"}));
  const auto exit = program.finish();
  ASSERT_TRUE(exit && !exit->success());
  EXPECT_THAT(program.errors,
              HasSubstr(R"(offload.activation_units: "layers.*" fits no unit; there are root, blocks.0, blocks.1)"));
  EXPECT_THAT(program.output, testing::Not(HasSubstr("step 1/")));
}

TEST_F(ActivationsJob, OfSplitLayersAndCutSequences) {
  expect_same_losses("split", {"tensor_parallel_degree=2", "precision=fp32", "model.checkpoint_activations=true"});
  expect_same_losses("cut", {"context_parallel_degree=2", "precision=fp32"});
}

TEST_F(ActivationsJob, SaysWhereNothingLeaves) {
  const std::string screen = job_.run("small", {"--set", "offload.activations=true"});
  EXPECT_THAT(
      screen,
      HasSubstr(
          "offload.activations: no unit saves a tensor of 1 MB or more beyond the horizon of 2, so all of them stay"));
}

}  // namespace
}  // namespace tesserae::train
