#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "tesserae/base/checksum.h"
#include "tesserae/os/shared_memory.h"
#include "tesserae/snapshot/snapshot_buffer.h"
#include "tesserae/train/folder_owner.h"
#include "tests/train/train_job.h"

// Jobs that are killed and go on from what they left in shared memory. Their checkpoint folder stays empty until they
// end: what they continue can only have come from memory. (Which snapshot is chosen: snapshot_set_test.cpp; what a
// snapshot is: snapshot_buffer_test.cpp.)

namespace tesserae::train {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int64_t last = 24;

class Memory : public testing::Test {
 protected:
  ~Memory() override {
    for (const std::string& path : left()) os::files().remove_all(path);
  }

  /// The beginning of the names of all snapshots of which this folder was or is the checkpoints'.
  std::string prefix() const { return cat("tesserae-", to_hex(checksum(job_.path("run/checkpoints"))), "-"); }

  /// Where rank `rank` keeps its snapshots, in the folder as it is now.
  std::string slot(int rank, int number) const {
    const config::Json owner = config::Json::parse(os::files().read(job_.path("run/checkpoints/owner.json")));
    return cat("/dev/shm/", prefix(), owner["identity"].get<std::string>(), "-rank-", rank, "-", number);
  }

  /// What jobs of this test left in shared memory.
  std::vector<std::string> left() const {
    std::vector<std::string> paths;
    for (const std::string& name : os::SharedMemory::names(prefix())) paths.push_back("/dev/shm/" + name);
    return paths;
  }

  /// The steps of those that are whole, with their paths.
  std::map<int64_t, std::string> complete_snapshots() const {
    std::map<int64_t, std::string> complete;
    for (const std::string& name : os::SharedMemory::names(prefix())) {
      if (const auto snapshot = snapshot::SnapshotBuffer(name).read()) {
        complete[snapshot->manifest.step] = "/dev/shm/" + name;
      }
    }
    return complete;
  }

  /// A snapshot every second step.
  static std::vector<std::string> arguments(int ranks, int degree, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {"--nproc",
                                    std::to_string(ranks),
                                    "--resume",
                                    "auto",
                                    "--set",
                                    cat("hybrid_shard_degree=", degree),
                                    "checkpoint.memory_every_steps=2"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  /// Starts a job and kills one of its processes when it is beyond step 9.
  void run_and_kill(int ranks, int degree, const std::vector<std::string>& more = {}) {
    Program program = job_.start("run", arguments(ranks, degree, more));
    ASSERT_TRUE(program.wait_for("step 9/")) << program.output << program.errors;
    if (ranks == 1) {
      program.process().signal(SIGKILL);
    } else {
      ::kill(children_of(program.process().id()).at(1), SIGKILL);
    }
    const auto exit = program.finish();
    ASSERT_TRUE(exit && !exit->success()) << program.errors;
    ASSERT_THAT(job_.steps("run"), IsEmpty());
    ASSERT_THAT(left(), SizeIs(ranks * 2));
  }

  /// The step at which it went on from memory; -1: it did not.
  static int64_t resumed_at(const std::string& said) {
    const std::string begin = "resumed at step ";
    const size_t found = said.find(begin);
    if (found == std::string::npos || said.find(" from memory of the hosts", found) == std::string::npos) return -1;
    return std::stoll(said.substr(found + begin.size()));
  }

  void expect_like_undisturbed(int ranks, int degree, const std::vector<std::string>& more = {}) {
    std::vector<std::string> undisturbed = {"--nproc", std::to_string(ranks), "--set",
                                            cat("hybrid_shard_degree=", degree), "checkpoint.every_steps=24"};
    undisturbed.insert(undisturbed.end(), more.begin(), more.end());
    job_.run("reference", undisturbed);
    job_.expect_same_history("run", "reference", last);
    job_.expect_same_state("run", "reference", last);
    EXPECT_THAT(left(), IsEmpty()) << "a job that ended well leaves nothing in memory";
  }

  /// The next job has another layout. What it goes on from is, bit for bit, what a job of `ranks` and `degree` saves.
  void goes_on_elsewhere(const std::vector<std::string>& next, int ranks, int degree,
                         const std::vector<std::string>& more = {}) {
    const std::string said = job_.run("run", next);
    ASSERT_THAT(said, HasSubstr("snapshots in memory are of 4 ranks with"));
    const std::vector<int64_t> steps = job_.steps("run");
    ASSERT_THAT(steps, SizeIs(2)) << "what was in memory, and the end";
    EXPECT_GE(steps.front(), 8);
    EXPECT_EQ(steps.back(), last);
    EXPECT_THAT(said, HasSubstr(cat("resumed at step ", steps.front())));
    std::vector<std::string> undisturbed = {"--nproc",
                                            std::to_string(ranks),
                                            "--set",
                                            cat("hybrid_shard_degree=", degree),
                                            "checkpoint.every_steps=2",
                                            "checkpoint.keep=0"};
    undisturbed.insert(undisturbed.end(), more.begin(), more.end());
    job_.run("reference", undisturbed);
    job_.expect_same_tensors("run", "reference", steps.front());
    EXPECT_THAT(left(), IsEmpty());
  }

  static void flip_a_bit(const std::string& path) {
    std::string bytes = os::files().read(path);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    os::files().write(path, bytes);
  }

  const TrainJob job_{"memory"};
};

TEST_F(Memory, AKilledJobGoesOnFromItsLastSnapshotBitwise) {
  run_and_kill(4, 4);
  const std::string said = job_.run("run", arguments(4, 4));
  EXPECT_GE(resumed_at(said), 8) << said;
  expect_like_undisturbed(4, 4);
}

// The newest checkpoint is later than what is in memory, and damaged: memory is the best that is left.
TEST_F(Memory, SnapshotsOutliveADamagedCheckpoint) {
  const std::vector<std::string> saving = arguments(2, 2,
                                                    {"train.steps=60", "checkpoint.every_steps=10", "checkpoint.keep=0",
                                                     "checkpoint.async=false", "checkpoint.memory_every_steps=18"});
  Program program = job_.start("run", saving);
  ASSERT_TRUE(program.wait_for("step 21/")) << program.output << program.errors;
  ::kill(children_of(program.process().id()).at(1), SIGKILL);
  ASSERT_TRUE(program.finish());
  // As if it had died at once: what is later than step 20 goes. Steps 10 and 20 are saved, 18 is in memory.
  const os::Path checkpoints = job_.path("run/checkpoints");
  while (job_.steps("run").back() > 20) os::files().remove_all(checkpoints / cat("step-", job_.steps("run").back()));
  ASSERT_THAT(job_.steps("run"), ElementsAre(10, 20));
  for (const std::string& name : os::SharedMemory::names(prefix())) {
    const auto snapshot = snapshot::SnapshotBuffer(name).read();
    if (snapshot && snapshot->manifest.step > 20) os::SharedMemory::remove(name);
  }
  flip_a_bit(checkpoints / "step-20/rank-1.safetensors");
  const std::string said = job_.run("run", saving);
  EXPECT_EQ(resumed_at(said), 18) << said;
  EXPECT_THAT(said, HasSubstr("step-20 is damaged: it is kept as"));
  EXPECT_TRUE(os::files().exists(checkpoints / "step-20.damaged"));
  EXPECT_THAT(job_.steps("run"), ElementsAre(10, 20, 30, 40, 50, 60));
  EXPECT_THAT(left(), IsEmpty());
}

TEST_F(Memory, AReplicaHasWhatAHostHasLost) {
  run_and_kill(4, 2);
  for (const int rank : {1, 2}) {  // their neighbours in the other replica are ranks 3 and 0
    for (const int number : {0, 1}) os::files().remove(slot(rank, number));
  }
  const std::string said = job_.run("run", arguments(4, 2));
  EXPECT_GE(resumed_at(said), 8) << said;
  expect_like_undisturbed(4, 2);
}

TEST_F(Memory, TensorParallelRanksHaveTheirParts) {
  const std::vector<std::string> split = {"tensor_parallel_degree=2", "model.heads=4"};
  run_and_kill(4, 2, split);
  const std::string said = job_.run("run", arguments(4, 2, split));
  EXPECT_GE(resumed_at(said), 8) << said;
  expect_like_undisturbed(4, 2, split);
}

TEST_F(Memory, ADamagedSnapshotIsNotUsedTheOneBeforeIs) {
  run_and_kill(1, 1);
  // A kill while a snapshot is written leaves one of the two. Then the job begins anew, in a new folder.
  for (int again = 0; complete_snapshots().size() < 2; ++again) {
    ASSERT_LT(again, 20) << "every kill met a snapshot that was being written";
    for (const std::string& path : left()) os::files().remove(path);
    os::files().remove_all(job_.path("run"));
    run_and_kill(1, 1);
  }
  const std::map<int64_t, std::string> snapshots = complete_snapshots();
  flip_a_bit(snapshots.rbegin()->second);
  const std::string said = job_.run("run", arguments(1, 1));
  EXPECT_THAT(said, HasSubstr("is damaged: block 0"));
  EXPECT_EQ(resumed_at(said), snapshots.begin()->first) << said;
  expect_like_undisturbed(1, 1);
}

// What was in memory is then a checkpoint like that of a run which never died, and the job goes on from it.
TEST_F(Memory, AJobOfAnotherSizeGoesOnFromWhatIsLeft) {
  run_and_kill(4, 2);
  for (const int rank : {1, 2}) {  // of each chunk, a replica is left
    for (const int number : {0, 1}) os::files().remove(slot(rank, number));
  }
  goes_on_elsewhere(arguments(2, 2), 4, 2);
}

TEST_F(Memory, AJobOfAnotherDegreeGoesOnFromWhatIsLeft) {
  run_and_kill(4, 4);
  goes_on_elsewhere(arguments(4, 1), 4, 4);
}

TEST_F(Memory, AJobOfAnotherTensorDegreeGoesOnFromWhatIsLeft) {
  run_and_kill(4, 2, {"tensor_parallel_degree=2", "model.heads=4"});
  goes_on_elsewhere(arguments(2, 1, {"model.heads=4"}), 4, 2, {"tensor_parallel_degree=2", "model.heads=4"});
}

class MemoryOfExperts : public Memory {
 protected:
  static std::vector<std::string> experts(int degree, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {cat("expert_parallel_degree=", degree), "model.experts=4",
                                    "model.experts_per_token=2", "model.feed_forward=32"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_F(MemoryOfExperts, AKilledJobGoesOnFromItsLastSnapshotBitwise) {
  run_and_kill(4, 4, experts(2));
  const std::string said = job_.run("run", arguments(4, 4, experts(2)));
  EXPECT_GE(resumed_at(said), 8) << said;
  expect_like_undisturbed(4, 4, experts(2));
}

// Rank 2 has the experts of rank 0, rank 3 those of rank 1, and all have the rest.
TEST_F(MemoryOfExperts, AReplicaHasWhatAHostHasLost) {
  run_and_kill(4, 1, experts(2));
  for (const int rank : {0, 3}) {
    for (const int number : {0, 1}) os::files().remove(slot(rank, number));
  }
  const std::string said = job_.run("run", arguments(4, 1, experts(2)));
  EXPECT_GE(resumed_at(said), 8) << said;
  expect_like_undisturbed(4, 1, experts(2));
}

TEST_F(MemoryOfExperts, AJobThatSharesThemOutOtherwiseGoesOnFromWhatIsLeft) {
  run_and_kill(4, 1, experts(2));
  for (const int rank : {0, 3}) {  // who would write what all hold is gone, and half of the experts is on rank 2 alone
    for (const int number : {0, 1}) os::files().remove(slot(rank, number));
  }
  goes_on_elsewhere(arguments(4, 2, experts(4)), 4, 1, experts(2));
}

TEST_F(Memory, AnotherModelOfAnotherSizeIsNotFilledFromMemory) {
  run_and_kill(2, 2);
  const std::string said = job_.run("run", arguments(1, 1, {"model.dimension=16", "train.steps=3"}));
  EXPECT_THAT(said, AllOf(HasSubstr("they are of another model"), HasSubstr("starting from step 0")));
  EXPECT_THAT(left(), IsEmpty());
}

TEST_F(Memory, WhatIsNotCompleteIsTakenAway) {
  run_and_kill(2, 2);
  for (const int number : {0, 1}) os::files().remove(slot(1, number));
  const std::string other = job_.run("run", arguments(1, 1, {"train.steps=3"}));
  EXPECT_THAT(other, HasSubstr("starting from step 0")) << "half of the state is gone";
  EXPECT_THAT(left(), IsEmpty());
}

TEST_F(Memory, SnapshotsThatAreNotContinuedAreTakenAway) {
  run_and_kill(2, 2);
  job_.run("run", {"--nproc", "1", "--set", "checkpoint.memory_every_steps=2", "train.steps=1",
                   cat("checkpoint.folder=", job_.path("run/checkpoints"))});  // from the beginning
  EXPECT_THAT(left(), IsEmpty()) << "also that of rank 1, which this job does not have";
}

TEST_F(Memory, TheSummaryHasWhatCopiesCost) {
  job_.run("cost", {"--nproc", "2", "--set", "checkpoint.memory_every_steps=2", "train.steps=6"});
  const config::Json cost = job_.summary("cost")["checkpoints"]["in_memory"];
  EXPECT_EQ(cost["copies"], 3);
  EXPECT_GT(cost["bytes"], 10'000);
  EXPECT_GT(cost["seconds"], 0);
  EXPECT_GT(cost["waited_seconds"], 0);
}

TEST_F(Memory, AnotherModelIsNotFilledFromMemory) {
  run_and_kill(1, 1);
  const std::string said = job_.run("run", arguments(1, 1, {"model.dimension=16", "train.steps=3"}));
  EXPECT_THAT(said, AllOf(HasSubstr("the snapshots in memory are not used"), HasSubstr("starting from step 0")));
  EXPECT_THAT(left(), IsEmpty());
}

// A folder that was removed and made again is another run's, whatever its path: not one step of the old one goes on.
TEST_F(Memory, ARunWhoseFolderWasRemovedBeginsAnew) {
  run_and_kill(2, 2);
  os::files().remove_all(job_.path("run"));
  const std::string said = job_.run("run", arguments(2, 2, {"optimizer.lr=1e-3", "train.steps=3"}));
  EXPECT_EQ(resumed_at(said), -1) << said;
  EXPECT_THAT(said, HasSubstr("starting from step 0"));
  EXPECT_THAT(job_.metrics("run"), SizeIs(3));
  EXPECT_THAT(left(), IsEmpty()) << "what nobody can go on from is not left in memory";
}

TEST_F(Memory, WithoutRoomTrainingGoesOnWithoutIt) {
  { const FolderOwner folder(job_.path("run/checkpoints")); }  // gives it its identity
  os::files().make_directory(slot(0, 0));                      // a name that no shared memory can take
  os::files().write(slot(0, 0) + "/file", "");
  const std::string said = job_.run("run", arguments(1, 1));
  EXPECT_THAT(said, HasSubstr("training goes on without snapshots in memory"));
  os::files().remove_all(slot(0, 0));
  expect_like_undisturbed(1, 1);
}

}  // namespace
}  // namespace tesserae::train
