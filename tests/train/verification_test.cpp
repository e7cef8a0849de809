#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include "tests/train/train_job.h"

// Bits that change in the memory of a living rank, as a broken memory chip would change them, and what a run that
// compares its replicas makes of it.

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::SizeIs;

/// Changes the lowest bit at every place where a process has these bytes in memory that it may write. How many places.
int flip(pid_t process, const std::string& pattern) {
  const int memory = ::open(cat("/proc/", process, "/mem").c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_GE(memory, 0) << "this needs the right to trace one's own children";
  std::istringstream maps(os::files().read(cat("/proc/", process, "/maps")));
  constexpr size_t shadow = size_t{1} << 34;  // a sanitizer's has terabytes, and nothing of the process's
  int flipped = 0;
  for (std::string line; std::getline(maps, line);) {
    size_t begin = 0, end = 0;
    char mode[5] = {};
    if (std::sscanf(line.c_str(), "%zx-%zx %4s", &begin, &end, mode) != 3 || std::string(mode, 2) != "rw") continue;
    if (end - begin > shadow) continue;
    std::string bytes(end - begin, '\0');
    const ssize_t got = ::pread(memory, bytes.data(), bytes.size(), static_cast<off_t>(begin));
    if (got <= 0) continue;
    bytes.resize(static_cast<size_t>(got));
    for (size_t at = bytes.find(pattern); at != std::string::npos; at = bytes.find(pattern, at + 1)) {
      const char changed = static_cast<char>(pattern.front() ^ 1);
      flipped += ::pwrite(memory, &changed, 1, static_cast<off_t>(begin + at)) == 1;
    }
  }
  ::close(memory);
  return flipped;
}

class Verification : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    job_ = new TrainJob("verification");
    // No update changes a parameter: what is in memory can be found again.
    job_->run("alone", with({"train.steps=1", "checkpoint.every_steps=1"}));
    const std::string embedding = job_->open("alone", 1).read("model/embedding.weight");
    pattern_ = embedding.substr(embedding.size() / 8 * 4, 64);
  }
  static void TearDownTestSuite() {
    delete job_;
    job_ = nullptr;
  }

  static std::vector<std::string> with(const std::vector<std::string>& settings, int ranks = 3) {
    std::vector<std::string> arguments = {
        "--nproc", std::to_string(ranks),   "--set", "optimizer.lr=0",
        "--set",   "hybrid_shard_degree=1", "--set", "recovery.check_replicas_every_steps=5"};
    for (const std::string& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }

  static TrainJob* job_;
  static std::string pattern_;
};

TrainJob* Verification::job_ = nullptr;
std::string Verification::pattern_;

TEST_F(Verification, OfThreeReplicasTheOddOneIsNamedAndMended) {
  Program program = job_->start("three", with({"train.steps=400", "checkpoint.every_steps=1000"}));
  ASSERT_TRUE(program.wait_for("step 7/")) << program.output << program.errors;
  const std::map<int, pid_t> ranks = ranks_of(program);
  ASSERT_TRUE(ranks.contains(1));
  EXPECT_GT(flip(ranks.at(1), pattern_), 0);
  const auto exit = program.finish(seconds(200));
  EXPECT_TRUE(exit && exit->success()) << program.output << program.errors;
  const config::Json found = job_->summary("three")["differing_replicas"];
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0]["ranks"], std::vector<int>{1});
  EXPECT_THAT(program.errors, HasSubstr("rank 1: embedding.weight"));
  int compared = 0;
  for (const config::Json& line : job_->metrics("three")) compared += line.contains("replica_check_ms");
  EXPECT_EQ(compared, 80);
  EXPECT_EQ(job_->open("three", 400).read("model/embedding.weight"),
            job_->open("alone", 1).read("model/embedding.weight"));
}

// Each expert is on one rank: nothing can be compared with it, and nothing has to be.
TEST_F(Verification, WhatHasAReplicaIsMendedBesideExpertsThatHaveNone) {
  job_->run("experts-alone",
            with({"train.steps=1", "checkpoint.every_steps=1", "model.experts=4", "expert_parallel_degree=4"}, 4));
  const std::string embedding = job_->open("experts-alone", 1).read("model/embedding.weight");
  Program program = job_->start(
      "experts",
      with({"train.steps=200", "checkpoint.every_steps=1000", "model.experts=4", "expert_parallel_degree=4"}, 4));
  ASSERT_TRUE(program.wait_for("step 7/")) << program.output << program.errors;
  EXPECT_GT(flip(ranks_of(program).at(2), embedding.substr(embedding.size() / 8 * 4, 64)), 0);
  const auto exit = program.finish(seconds(200));
  EXPECT_TRUE(exit && exit->success()) << program.output << program.errors;
  const config::Json found = job_->summary("experts")["differing_replicas"];
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0]["ranks"], std::vector<int>{2});
  EXPECT_EQ(job_->open("experts", 200).read("model/embedding.weight"), embedding);
}

TEST_F(Verification, OfTwoNothingIsSavedAndTheRunEnds) {
  Program program = job_->start("two", with({"train.steps=4000", "checkpoint.every_steps=5"}, 2));
  ASSERT_TRUE(program.wait_for("saved step 10")) << program.output << program.errors;
  EXPECT_GT(flip(ranks_of(program).at(0), pattern_), 0);
  const auto exit = program.finish(seconds(200));
  EXPECT_TRUE(exit && exit->signal == 0 && exit->code == 1) << program.output << program.errors;
  EXPECT_THAT(program.errors, HasSubstr("rank 0: embedding.weight; rank 1: embedding.weight"));
  // What is saved of the step after which they agreed last may have changed between the comparison and the copy, and
  // may not have come to its end. All before that is sound.
  const std::string advice = "agreed after step ";
  const size_t at = program.errors.find(advice);
  ASSERT_NE(at, std::string::npos) << program.errors;
  const int64_t agreed = std::stoll(program.errors.substr(at + advice.size()));
  EXPECT_THAT(program.errors, HasSubstr(cat(advice, agreed, ": go on from a checkpoint of before that step")));
  std::vector<int64_t> saved = job_->steps("two");
  ASSERT_FALSE(saved.empty());
  EXPECT_LE(saved.back(), agreed);
  std::erase_if(saved, [agreed](int64_t step) { return step >= agreed; });
  ASSERT_FALSE(saved.empty()) << agreed;
  EXPECT_EQ(saved.back(), agreed - 5) << "nothing else is lost";
  for (const int64_t step : saved) {
    EXPECT_TRUE(job_->open("two", step).read("model/embedding.weight") ==
                job_->open("alone", 1).read("model/embedding.weight"))
        << step;
  }
}

TEST_F(Verification, WithoutReplicasItSaysThatNothingIsCompared) {
  EXPECT_THAT(job_->run("none", with({"train.steps=5", "hybrid_shard_degree=3"})),
              HasSubstr("no part of the state has a replica"));
}

}  // namespace
}  // namespace tesserae::train
