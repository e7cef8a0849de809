#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/config/json.h"
#include "tesserae/os/files.h"
#include "tesserae/os/port.h"
#include "tests/support/promise.h"
#include "tests/train/run_program.h"

// `tesserae train` as users run it: real processes on Gloo, a small model on text with structure to learn.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

class EndToEnd : public testing::Test {
 protected:
  EndToEnd() {
    os::files().make_directories(folder_);
    std::string text;
    for (int line = 0; line < 1500; ++line)
      text += cat("the square of ", line % 97, " is ", (line % 97) * (line % 97), "\n");
    os::files().write(folder_ + "/text.txt", text);
    const config::Json config = {
        {"run", {{"folder", folder_ + "/run"}, {"log_every", 10}}},
        {"model", {{"dimension", 32}, {"layers", 2}, {"heads", 2}}},
        {"data", {{"path", folder_ + "/text.txt"}, {"sequence_length", 32}}},
        {"train", {{"steps", 30}, {"batch_per_rank", 4}, {"eval_every", 10}, {"eval_batches", 2}}},
        {"optimizer", {{"lr", 1e-2}, {"warmup_steps", 3}}}};
    os::files().write(folder_ + "/job.json", config.dump());
  }
  ~EndToEnd() override { os::files().remove_all(folder_); }

  std::vector<std::string> command(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {TESSERAE_PROGRAM, "train", folder_ + "/job.json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  void run(const std::vector<std::string>& more) {
    Program program(command(more));
    const auto exit = program.finish(seconds(200));
    ASSERT_TRUE(exit.has_value()) << program.output << program.errors;
    ASSERT_TRUE(exit->success()) << exit->text() << "\n" << program.output << program.errors;
    screen_ = program.output;
  }

  std::vector<config::Json> metrics(const std::string& run = "run") const {
    std::vector<config::Json> lines;
    std::istringstream file(os::files().read(folder_ + "/" + run + "/metrics.jsonl"));
    for (std::string line; std::getline(file, line);) lines.push_back(config::Json::parse(line));
    return lines;
  }

  config::Json summary(const std::string& run = "run") const {
    return config::Json::parse(os::files().read(folder_ + "/" + run + "/summary.json"));
  }

  std::vector<double> losses(const std::string& run) const {
    std::vector<double> all;
    for (const config::Json& line : metrics(run)) all.push_back(line["loss"]);
    return all;
  }

  void expect_trained(int ranks, const config::Json& layout) const {
    const std::vector<config::Json> lines = metrics();
    ASSERT_EQ(lines.size(), 30u);
    for (size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i]["step"], i + 1);
      for (const char* key : {"loss", "lr", "grad_norm", "tokens_per_second", "step_ms", "comm_ms"}) {
        ASSERT_TRUE(lines[i].contains(key) && lines[i][key].is_number()) << key << " of " << lines[i];
      }
      EXPECT_GT(lines[i]["grad_norm"], 0.0);
      EXPECT_GE(lines[i]["comm_ms"], 0.0);
      EXPECT_LE(lines[i]["comm_ms"], lines[i]["step_ms"]);
      EXPECT_EQ(lines[i].contains("val_loss"), (i + 1) % 10 == 0);
    }
    EXPECT_NEAR(lines.front()["loss"], std::log(257.0), 0.2);
    EXPECT_LT(lines.back()["loss"], 3.2);

    const config::Json result = summary();
    EXPECT_EQ(result["steps"], 30);
    EXPECT_LT(result["final_loss"], 3.5);
    EXPECT_LT(result["val_loss"], 3.3);
    EXPECT_GT(result["tokens_per_second"], 0.0);
    EXPECT_GT(result["step_ms_median"], 0.0);
    EXPECT_GE(result["comm_share"], 0.0);
    EXPECT_LE(result["comm_share"], 1.0);
    EXPECT_GT(result["peak_memory_bytes"], 10'000'000);
    EXPECT_EQ(result["peak_memory_bytes_by_rank"].size(), static_cast<size_t>(ranks));
    EXPECT_EQ(result["layout"], layout);
    EXPECT_EQ(result["world_size"], ranks);
    EXPECT_EQ(result["parameters"], 257 * 32 + 32 + 2 * (4 * 32 * 32 + 3 * 32 * 96 + 2 * 32));
    const config::Json config = config::Json::parse(os::files().read(folder_ + "/run/config.json"));
    EXPECT_EQ(config["model"]["vocabulary"], 257);
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-train-" + std::to_string(::getpid());
  std::string screen_;
};

TEST_F(EndToEnd, OneProcess) {
  run({});
  expect_trained(1, {{"N", 1}, {"P", 1}, {"G", 1}, {"O", 1}});
  EXPECT_THAT(screen_, HasSubstr("step 10/30  loss "));
  EXPECT_EQ(screen_.find('\r'), std::string::npos) << "no live line where no person looks";
}

TEST_F(EndToEnd, TwoRanks) {
  run({"--nproc", "2"});
  expect_trained(2, {{"N", 2}, {"P", 2}, {"G", 2}, {"O", 2}});
}

TEST_F(EndToEnd, FourRanksHybrid) {
  run({"--nproc", "4", "--set", "hybrid_shard_degree=2"});
  expect_trained(4, {{"N", 4}, {"P", 2}, {"G", 2}, {"O", 2}});
}

TEST_F(EndToEnd, TheSameGlobalBatchGivesTheSameLosses) {
  const auto with = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), {"--set", "run.folder=" + folder_ + "/" + name, "--set", "train.steps=10"});
    run(more);
    return losses(name);
  };
  const auto one = with("one", {"--set", "train.batch_per_rank=8"});
  const auto two = with("two", {"--nproc", "2", "--set", "sharding.strategy=ZERO_1"});
  const auto accumulated = with("accumulated", {"--nproc", "2", "--set", "train.batch_per_rank=2", "--set",
                                                "train.accumulate=2", "--set", "train.accumulation=two_hop"});
  ASSERT_EQ(one.size(), 10u);
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i], two[i], 1e-4 * one[i]) << "step " << i + 1;
    EXPECT_NEAR(one[i], accumulated[i], 1e-4 * one[i]) << "step " << i + 1;
  }
}

TEST_F(EndToEnd, SgdBf16CheckpointingAndASample) {
  run({"--nproc", "2", "--set", "optimizer.name=sgd", "--set", "optimizer.lr=0.3", "--set", "precision=bf16", "--set",
       "model.checkpoint_activations=true", "--set", "model.dropout=0.1", "--set", "train.sample_tokens=40", "--set",
       "train.sample_prompt=the "});
  EXPECT_LT(metrics().back()["loss"], 5.0);
  EXPECT_EQ(summary()["precision"], "bf16");
  EXPECT_THAT(screen_, HasSubstr("\nA sample:\nthe "));
}

TEST_F(EndToEnd, ASecondRunLeavesTheFirstAlone) {
  run({"--set", "train.steps=3"});
  const std::string first = os::files().read(folder_ + "/run/metrics.jsonl");
  run({"--set", "train.steps=2"});
  EXPECT_EQ(os::files().read(folder_ + "/run/metrics.jsonl"), first);
  EXPECT_EQ(summary("run-2")["steps"], 2);
}

TEST_F(EndToEnd, JoinsALauncherThatOnlySetsVariables) {
  const std::string port = std::to_string(os::free_port());
  const auto environment = [&](const std::string& rank) {
    return std::map<std::string, std::string>{
        {"RANK", rank},        {"WORLD_SIZE", "2"},          {"LOCAL_RANK", rank},    {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_PORT", port}, {"MASTER_ADDR", "127.0.0.1"}, {"OMP_NUM_THREADS", "1"}};
  };
  const auto asking = command({"--set", "recovery.replacements=1", "--set", "recovery.max_restarts=2"});
  Program other(asking, environment("1")), leader(asking, environment("0"));
  const auto exit = leader.finish(seconds(200));
  ASSERT_TRUE(exit && exit->success()) << leader.errors << other.errors;
  EXPECT_THAT(leader.errors, HasSubstr("recovery.replacements, recovery.max_restarts: without effect here, since "
                                       "another launcher has started the ranks"));
  EXPECT_TRUE(other.finish(seconds(60))->success()) << other.errors;
  EXPECT_EQ(other.output, "") << "only rank 0 writes";
  EXPECT_THAT(other.errors, testing::Not(HasSubstr("without effect")));
  expect_trained(2, {{"N", 2}, {"P", 2}, {"G", 2}, {"O", 2}});
}

TEST_F(EndToEnd, JoinsTorchrun) {
  std::vector<std::string> arguments = {
      TESSERAE_PYTHON, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2"};
  for (const std::string& argument : command({})) arguments.push_back(argument);
  Program program(arguments);
  const auto exit = program.finish(seconds(280));
  ASSERT_TRUE(exit && exit->success()) << program.errors;
  expect_trained(2, {{"N", 2}, {"P", 2}, {"G", 2}, {"O", 2}});
}

/// A job that goes on until something ends it.
class EndlessJob : public EndToEnd {
 protected:
  Program start(int ranks) {
    Program job(
        command({"--nproc", std::to_string(ranks), "--set", "train.steps=1000000", "--set", "train.eval_every=0"}));
    EXPECT_TRUE(job.wait_for("step 10/", seconds(150))) << job.output << job.errors;
    launcher_ = job.process().id();
    std::istringstream ids(os::files().read(cat("/proc/", launcher_, "/task/", launcher_, "/children")));
    for (pid_t id = 0; ids >> id;) ranks_.push_back(id);
    EXPECT_EQ(ranks_.size(), static_cast<size_t>(ranks));
    return job;
  }

  void expect_nothing_left() const {
    for (const pid_t id : ranks_) {
      const os::Deadline deadline(seconds(30));
      while (os::start_time(id) && !deadline.passed()) os::sleep_for(std::chrono::milliseconds(5));
      EXPECT_FALSE(os::start_time(id)) << id;
    }
  }

  pid_t launcher_ = 0;
  std::vector<pid_t> ranks_;
};

TEST_F(EndlessJob, AKilledRankTakesTheJobDown) {
  std::vector<double> took;
  for (int i = 0; i < 5; ++i) {
    ranks_.clear();
    Program job = start(4);
    const os::TimePoint begin = os::now();
    ::kill(ranks_[2], SIGKILL);
    const auto exit = job.finish();
    took.push_back(std::chrono::duration<double>(os::now() - begin).count());
    ASSERT_TRUE(exit.has_value());
    EXPECT_EQ(exit->code, 128 + SIGKILL) << job.errors;
    EXPECT_THAT(job.errors,
                HasSubstr("tesserae: rank 2 of 4 was killed by signal 9 (Killed); the other ranks were ended"));
    expect_nothing_left();
  }
  expect_promise(took, 5);
}

TEST_F(EndlessJob, CtrlCEndsAfterAStepWithASummary) {
  Program job = start(2);
  job.process().signal(SIGINT);
  const auto exit = job.finish();
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code, 128 + SIGINT) << job.errors;
  EXPECT_EQ(summary()["stopped_by_signal"], SIGTERM) << "what the launcher sends to its ranks";
  EXPECT_EQ(summary()["steps"], metrics().size());
  expect_nothing_left();
}

}  // namespace
}  // namespace tesserae::train
