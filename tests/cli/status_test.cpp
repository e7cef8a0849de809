#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tesserae/os/files.h"
#include "tests/train/run_program.h"

namespace tesserae {
namespace {

using testing::HasSubstr;

/// Runs `tesserae train` on a small text, where nothing is ever trained.
class Status : public testing::Test {
 protected:
  Status() {
    os::files().make_directories(folder_ + "/empty");
    os::files().write(folder_ + "/text.txt", std::string(3000, 'a') + "\n");
    os::files().write(folder_ + "/job.json",
                      R"({"data": {"path": ")" + folder_ + R"(/text.txt", "sequence_length": 32}})");
  }
  ~Status() override { os::files().remove_all(folder_); }

  Program train(std::vector<std::string> arguments, std::map<std::string, std::string> environment = {}) {
    arguments.insert(arguments.begin(), {TESSERAE_PROGRAM, "train", folder_ + "/job.json"});
    return Program(arguments, std::move(environment));
  }

  void expect_refused(Program program, const std::string& what) {
    const auto exit = program.finish();
    ASSERT_TRUE(exit.has_value());
    EXPECT_EQ(exit->code, 2) << exit->text();
    EXPECT_THAT(program.errors, HasSubstr(what));
    EXPECT_EQ(program.errors.find('\n'), program.errors.size() - 1) << "one line: " << program.errors;
    EXPECT_EQ(program.output, "");
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-cli-" + std::to_string(::getpid());
};

TEST_F(Status, ConfigurationErrorsAreTwoAndOneLine) {
  expect_refused(train({"--set", "train.stpes=5"}), "train.stpes: unknown key; did you mean train.steps?");
  expect_refused(train({"--set", "train.steps=many"}), "train.steps: must be an integer, but is \"many\"");
  expect_refused(train({"--set", "train.steps"}), "--set takes KEY=VALUE");
  expect_refused(train({"--nproc", "4", "--set", "hybrid_shard_degree=3"}), "hybrid_shard_degree");
  expect_refused(train({"--set", "data.path=/nowhere"}), "data.path: there is no file or folder /nowhere");
  expect_refused(train({"--set", "data.path=" + folder_ + "/empty"}), "data");
  expect_refused(train({"--set", "data.sequence_length=100000"}), "data.sequence_length");
  expect_refused(train({"--set", "model.vocabulary=100"}), "model.vocabulary");
  expect_refused(Program({TESSERAE_PROGRAM, "train", "/nowhere.json"}), "/nowhere.json");
  expect_refused(train({"--resume", "/nowhere"}), "there is no folder /nowhere");
  expect_refused(train({"--set", "recovery.shared=/nowhere", "--set", "recovery.min_ranks=1", "--nproc", "2"}),
                 "recovery.shared: /nowhere is no folder: make it");
  expect_refused(train({"--resume", "auto"}), "give checkpoint.every_steps or another key");
}

TEST_F(Status, SizesThatCannotBeAreNamed) {
  expect_refused(train({"--set", "model.layers=1000000000"}),
                 "model.layers: must be at most 100000, but is 1000000000");
  expect_refused(
      train({"--set", "train.batch_per_rank=1000000000", "--set", "train.accumulate=1000000000"}),
      "train.batch_per_rank: batch_per_rank * accumulate * 1 ranks * data.sequence_length is 3.2e+19 tokens");
}

/// One line, which says what needs less, and not where in torch there was none.
TEST_F(Status, MemoryThatRunsOut) {
  Program program({"bash", "-c", R"(ulimit -v 16000000; exec "$0" "$@")", TESSERAE_PROGRAM, "train",
                   folder_ + "/job.json", "--set", "train.batch_per_rank=1000000000", "--set",
                   "run.folder=" + folder_ + "/run"});
  const auto exit = program.finish();
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->code, 1) << exit->text();
  EXPECT_THAT(program.errors, HasSubstr("[train] cannot allocate "));
  EXPECT_THAT(program.errors, HasSubstr("`tesserae plan` says what fits\n"));
  EXPECT_EQ(program.errors.find("frame #"), std::string::npos) << program.errors;
}

TEST_F(Status, OutputThatIsLostIsAFailure) {
  for (const char* words : {"config --schema", "--version", "plan --parameters 1e9 --layers 4 --dimension 1024"}) {
    Program program({"bash", "-c", cat("\"$0\" ", words, " > /dev/full"), TESSERAE_PROGRAM});
    EXPECT_EQ(program.finish()->code, 1) << words;
    EXPECT_THAT(program.errors, HasSubstr("could not be written"));
  }
}

TEST_F(Status, UsageErrorsAreTwo) {
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {}, {"train"}, {"trian"}, {"train", "job.json", "--nproc", "0"}, {"train", "job.json", "--no-such"}}) {
    std::vector<std::string> arguments = {TESSERAE_PROGRAM};
    arguments.insert(arguments.end(), wrong.begin(), wrong.end());
    Program program(arguments);
    EXPECT_EQ(program.finish()->code, 2) << testing::PrintToString(wrong);
    EXPECT_NE(program.errors, "");
  }
}

TEST_F(Status, NumbersThatCannotBeAreNamed) {
  const std::vector<std::string> plan = {"plan", "--layers", "2", "--dimension", "128", "--parameters", "2e6"};
  const std::vector<std::string> above = {"nan", "-nan", "inf", "-5", "0", "1e999"};
  std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> cases;
  for (const char* option : {"--memory", "--inside-gbps", "--between-gbps", "--tflops", "--devices", "--per-host"}) {
    std::vector<std::string> words = plan;
    words.emplace_back(option);
    cases.emplace_back(words, above);
  }
  cases.push_back(cases.front());
  cases.back().second = {"-5GB", "0GB"};
  for (const char* verb : {"dial", "scale", "stacks", "trace"}) cases.push_back({{verb, "/nowhere", "--wait"}, above});
  cases.push_back({{"plan", "--parameters"}, above});
  cases.push_back({{"run", "--host-deadline"}, above});
  cases.push_back({{"run", "--grace"}, {"nan", "inf", "-5"}});
  cases.push_back({{"probe", "--window"}, {"nan", "0", "61", "inf"}});
  cases.push_back({{"probe", "--deadline"}, {"nan", "0", "86401"}});
  cases.push_back({{"doctor", "--deadline"}, {"nan", "0", "86401"}});
  for (auto& [words, values] : cases) {
    const std::string option = words.back();
    for (const std::string& value : values) {
      words.back() = option + "=" + value;
      std::vector<std::string> arguments = {TESSERAE_PROGRAM};
      arguments.insert(arguments.end(), words.begin(), words.end());
      Program program(arguments);
      EXPECT_EQ(program.finish()->code, 2) << testing::PrintToString(words);
      EXPECT_THAT(program.errors, testing::StartsWith(option + ": must be "));
      EXPECT_THAT(program.errors, HasSubstr(", but is " + value + "\n"));
      EXPECT_EQ(program.output, "");
    }
  }
}

TEST_F(Status, DryRunTrainsNothing) {
  Program program = train({"--nproc", "4", "--dry-run", "--set", "hybrid_shard_degree=2", "train.steps=7"});
  EXPECT_TRUE(program.finish()->success()) << program.errors;
  EXPECT_THAT(program.output, HasSubstr("\"steps\": 7"));
  EXPECT_THAT(program.output, HasSubstr("P=2 G=2 O=2"));
  EXPECT_FALSE(os::files().exists("runs/job"));
}

TEST_F(Status, TheLastAssignmentOfAKeyCounts) {
  for (const bool together : {true, false}) {
    std::vector<std::string> words = {"--nproc", "2", "--dry-run", "--set", "train.accumulate=2"};
    if (!together) words.push_back("--set");
    words.insert(words.end(), {"train.steps=5", "--set", "train.steps=9"});
    Program program = train(words);
    EXPECT_TRUE(program.finish()->success()) << program.errors;
    EXPECT_THAT(program.output, HasSubstr("\"steps\": 9"));
    EXPECT_THAT(program.output, HasSubstr("\"accumulate\": 2"));
  }
}

TEST_F(Status, NprocMustAgreeWithTheLauncher) {
  expect_refused(train({"--nproc", "4"}, {{"RANK", "0"},
                                          {"WORLD_SIZE", "2"},
                                          {"LOCAL_RANK", "0"},
                                          {"LOCAL_WORLD_SIZE", "2"},
                                          {"MASTER_ADDR", "127.0.0.1"},
                                          {"MASTER_PORT", "29500"}}),
                 "--nproc 4 contradicts torchrun, which started 2 ranks on this host: leave it out");
}

TEST_F(Status, TheOnlyTaskOfANodeStartsItsRanks) {
  const std::map<std::string, std::string> task{
      {"SLURM_PROCID", "1"},          {"SLURM_NTASKS", "2"},  {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS_PER_NODE", "1"},
      {"SLURM_STEP_NODELIST", "a,b"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "7"}};
  Program program = train({"--nproc", "3", "--dry-run"}, task);
  EXPECT_TRUE(program.finish()->success()) << program.errors;
  EXPECT_THAT(program.output, HasSubstr("on 6 ranks"));
  expect_refused(
      train({"--nproc", "4"}, {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}),
      "--nproc 4 contradicts torchrun, which started 1 rank on this host: leave it out");
}

TEST_F(Status, APodAndAHostOfSageMakerStartTheirRanks) {
  const std::map<std::string, std::string> pod{
      {"PET_NNODES", "3"}, {"PET_NODE_RANK", "1"},  {"PET_NPROC_PER_NODE", "2"}, {"RANK", "1"},
      {"WORLD_SIZE", "6"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "23456"}};
  const std::map<std::string, std::string> host{
      {"SM_HOSTS", R"(["algo-1","algo-2"])"}, {"SM_CURRENT_HOST", "algo-2"}, {"SM_NUM_GPUS", "4"}};
  for (const auto& [environment, nproc, says] :
       {std::tuple(pod, "0", "on 6 ranks"), std::tuple(pod, "5", "on 15 ranks"), std::tuple(host, "0", "on 8 ranks"),
        std::tuple(host, "1", "on 2 ranks")}) {
    std::vector<std::string> words = {"--dry-run"};
    if (nproc != std::string("0")) words.insert(words.end(), {"--nproc", nproc});
    Program program = train(words, environment);
    EXPECT_TRUE(program.finish()->success()) << program.errors;
    EXPECT_THAT(program.output, HasSubstr(says));
  }
}

}  // namespace
}  // namespace tesserae
