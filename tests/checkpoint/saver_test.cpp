#include "tesserae/checkpoint/saver.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <atomic>
#include <functional>
#include <nlohmann/json.hpp>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/random_state.h"
#include "tesserae/checkpoint/snapshot.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/os/clock.h"
#include "tests/checkpoint/memory_files.h"
#include "tests/checkpoint/sample.h"
#include "tests/checkpoint/trained.h"

namespace tesserae::checkpoint {
namespace {

using testing::Assembled;
using testing::borrowed;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Trained;
using testing::with_degrees;

/// A file system on which chosen files cannot be synced, and syncing can be made to take long.
class BadDisk : public testing::MemoryFiles {
 public:
  std::unique_ptr<os::WritableFile> create(const os::Path& path) override {
    class File : public os::WritableFile {
     public:
      File(BadDisk& disk, os::Path path, std::unique_ptr<os::WritableFile> under)
          : disk_(disk), path_(std::move(path)), under_(std::move(under)) {}
      void write(std::string_view bytes) override { under_->write(bytes); }
      void sync() override {
        ++disk_.syncing;
        while (disk_.slow && path_.filename().native().starts_with(disk_.slow_file))
          os::sleep_for(std::chrono::milliseconds(1));
        --disk_.syncing;
        disk_.check(path_);
        under_->sync();
      }
      void close() override { under_->close(); }

     private:
      BadDisk& disk_;
      os::Path path_;
      std::unique_ptr<os::WritableFile> under_;
    };
    if (dead) check(path);
    return std::make_unique<File>(*this, path, MemoryFiles::create(path));
  }

  void check(const os::Path& path) const {
    const std::string name = path.filename();
    if (broken && name.starts_with(victim)) throw IoError("BadDisk", cat(path.native(), ": Input/output error"));
  }

  std::string victim = "rank-1.safetensors";
  std::atomic<bool> broken{false};
  std::atomic<bool> dead{false};  ///< not even a mark can be left
  std::atomic<bool> slow{false};
  std::string slow_file;  ///< of the names that begin so
  std::atomic<int> syncing{0};
  std::atomic<bool> slow_to_remove{false};  ///< what was a checkpoint takes 5 s

  void remove(const os::Path& path) override {
    if (slow_to_remove && path.filename() == manifest_name) os::sleep_for(std::chrono::seconds(5));
    MemoryFiles::remove(path);
  }
};

class SaverTest : public ::testing::Test {
 protected:
  std::vector<int64_t> saved() const {
    std::vector<int64_t> steps;
    for (const Committed& found : list_checkpoints("/f")) steps.push_back(found.step);
    return steps;
  }

  BadDisk& disk_ =
      *new BadDisk;  // never destroyed: the thread of a save that was given up may still be about to use it
  os::ScopedFiles scoped_{disk_};
};

/// The tensors of a checkpoint as Assembled::bytes has them.
std::map<std::string, std::string> bytes_of(const os::Path& path) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  std::map<std::string, std::string> bytes;
  for (const StoredTensor& tensor : checkpoint.manifest().tensors) bytes[tensor.name] = checkpoint.read(tensor.name);
  return bytes;
}

// The values are those at the call, though training goes on meanwhile and ends before the disk does.
TEST_F(SaverTest, AsynchronousSavesHoldTheValuesAtTheCall) {
  std::map<int64_t, Assembled> expected;
  for (int64_t step = 1; step <= 6; ++step) expected[step];
  comm::run_local(4, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({2, 2, 4}));
    at::Tensor buffer = at::zeros({5});
    Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = true});
    for (int step = 1; step <= 6; ++step) {
      trained.step([&] { saver.wait_copied(); });
      buffer.fill_(step);
      State state = trained.state();
      Piece piece = replicated("buffer/running", buffer, fabric.rank());
      piece.changes_in_forward = true;
      state.pieces.push_back(piece);
      expected[step].add(state.pieces);
      saver.save(state);
      buffer.fill_(-1);  // as the next forward would
      EXPECT_EQ(saver.saved_step(), step == 1 ? std::nullopt : std::optional<int64_t>(step - 1));
    }
    saver.wait_copied();
    for (auto& shard : trained.sharded().shards()) shard.master.fill_(7);
    saver.finish();
    EXPECT_EQ(saver.saved_step(), 6);
    EXPECT_FALSE(saver.busy());
  });
  EXPECT_THAT(saved(), ElementsAre(1, 2, 3, 4, 5, 6));
  for (const int64_t step : saved()) {
    EXPECT_EQ(bytes_of(cat("/f/step-", step)), expected[step].bytes()) << step;
    EXPECT_TRUE(verify(cat("/f/step-", step)).faults.empty());
  }
  EXPECT_TRUE(testing::strays_in("/f").empty());
}

// A rank is lost, and each of the others leaves when it notices: nobody waits for another, and nothing is lost that all
// have written.
TEST_F(SaverTest, WhatIsLeftIsWrittenToItsEnd) {
  Assembled expected;
  disk_.slow_file = "rank-1.safetensors";
  disk_.slow = true;
  comm::run_local(3, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 3}));
    trained.step();
    State state = trained.state();
    state.training = {{"by", fabric.rank()}};
    expected.add(state.pieces);
    Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = true});
    saver.save(state);
    if (fabric.rank() != 1) saver.leave();
    EXPECT_EQ(saver.busy(), fabric.rank() == 1);
    fabric.everyone().barrier();
    if (fabric.rank() != 1) return;
    EXPECT_TRUE(saved().empty());
    EXPECT_FALSE(commit_left_behind("/f", 0)) << "a part is missing";
    disk_.slow = false;
    saver.leave();
  });
  EXPECT_TRUE(saved().empty());
  ASSERT_EQ(commit_left_behind("/f", 0), "/f/step-1");
  EXPECT_EQ(bytes_of("/f/step-1"), expected.bytes());
  EXPECT_EQ(Checkpoint::open("/f/step-1").manifest().training, nlohmann::json({{"by", 0}}));
  EXPECT_TRUE(testing::strays_in("/f").empty());
}

TEST_F(SaverTest, TrainingDoesNotWaitForTheDisk) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    trained.step();
    Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = true});
    if (fabric.rank() == 0) disk_.slow = true;
    fabric.everyone().barrier();
    saver.save(trained.state());
    for (int step = 0; step < 3; ++step) trained.step([&] { saver.wait_copied(); });
    EXPECT_TRUE(saver.busy());
    EXPECT_FALSE(saver.failed());
    EXPECT_EQ(saver.saved_step(), std::nullopt);
    fabric.everyone().barrier();
    if (fabric.rank() == 0) disk_.slow = false;
    saver.finish();
    EXPECT_EQ(saver.saved_step(), 1);
  });
}

TEST_F(SaverTest, AFailureOnOneRankIsThrownOnAllAndTrainingGoesOn) {
  for (const bool asynchronous : {false, true}) {
    for (const bool dead : {false, true}) {
      disk_.remove_all("/f");
      comm::run_local(3, [&](comm::Fabric& fabric) {
        Trained trained(fabric, testing::NetOptions{}, with_degrees({3, 3, 3}));
        Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = asynchronous});
        trained.step();
        saver.save(trained.state());
        saver.finish();
        trained.step([&] { saver.wait_copied(); });
        fabric.everyone().barrier();
        if (fabric.rank() == 0) {
          disk_.broken = true;
          disk_.dead = dead;  // then rank 0 learns of it from nobody but rank 1's training thread
          disk_.victim = dead ? "rank-1." : "rank-1.safetensors";
        }
        fabric.everyone().barrier();
        const os::TimePoint begin = os::now();
        try {
          saver.save(trained.state());
          saver.finish();
          ADD_FAILURE() << "saved";
        } catch (const SaveFailed& failure) {
          EXPECT_EQ(failure.step, 2);
          EXPECT_THAT(failure.what(), HasSubstr("Input/output error"));
        }
        EXPECT_LT(os::now() - begin, std::chrono::seconds(5));
        EXPECT_EQ(saver.saved_step(), 1);
        fabric.everyone().barrier();
        if (fabric.rank() == 0) disk_.broken = disk_.dead = false;
        fabric.everyone().barrier();
        trained.step([&] { saver.wait_copied(); });
        saver.save(trained.state());
        saver.finish();
        EXPECT_EQ(saver.saved_step(), 3);
      });
      EXPECT_THAT(saved(), ElementsAre(1, 3));
      EXPECT_TRUE(testing::strays_in("/f").empty());
    }
  }
}

// A piece that cannot be saved, on one rank only: nobody is left waiting.
TEST_F(SaverTest, AMistakeOnOneRankIsThrownOnAll) {
  const auto too_short = [](at::Tensor& data) { data = data.narrow(0, 0, 1); };
  const auto none = [](at::Tensor& data) { data = at::Tensor(); };
  for (const auto& [asynchronous, mistake] : std::vector<std::pair<bool, std::function<void(at::Tensor&)>>>{
           {false, too_short}, {true, too_short}, {true, none}}) {
    comm::run_local(2, [&, asynchronous = asynchronous, mistake = mistake](comm::Fabric& fabric) {
      Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
      Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = asynchronous});
      State state = trained.state();
      if (fabric.rank() == 1) mistake(state.pieces[0].data);
      try {
        saver.save(state);
        saver.finish();
        ADD_FAILURE() << "saved";
      } catch (const SaveFailed& failure) {
        EXPECT_THAT(failure.what(), HasSubstr("rank 1: [Saver::save] piece of \"model/"));
      }
      saver.save(trained.state());
      saver.finish();
    });
  }
  EXPECT_THAT(saved(), ElementsAre(0, 0, 0));
}

TEST_F(SaverTest, BlocksHaveASizeThatAReaderTakes) {
  comm::run_local(1, [&](comm::Fabric& fabric) {
    for (const int64_t bytes : {-1, 0, 1, 3000, 128 << 20}) {
      EXPECT_THROW(Saver(borrowed(fabric), {.folder = "/f", .block_bytes = bytes}), InvalidArgument) << bytes;
    }
  });
}

TEST_F(SaverTest, FailureShowsBeforeAnyoneWaits) {
  disk_.broken = true;
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = true});
    saver.save(trained.state());
    saver.wait_copied();
    const os::Deadline deadline(std::chrono::seconds(20));
    while (fabric.rank() == 1 && !saver.failed() && !deadline.passed()) os::sleep_for(std::chrono::milliseconds(1));
    if (fabric.rank() == 1) {
      EXPECT_TRUE(saver.failed());
    }
    EXPECT_THROW(saver.finish(), SaveFailed);
    EXPECT_NO_THROW(saver.finish());
  });
}

TEST_F(SaverTest, GivingUpLeavesNothingCommitted) {
  disk_.slow = true;
  std::jthread mends_the_disk;
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    {
      Saver saver(borrowed(fabric), {.folder = "/f", .asynchronous = true});
      saver.save(trained.state());
      fabric.everyone().barrier();
      if (fabric.rank() == 0) {
        mends_the_disk = std::jthread([&] {
          os::sleep_for(std::chrono::milliseconds(50));
          disk_.slow = false;
        });
      }
    }
    fabric.everyone().barrier();
  });
  EXPECT_THAT(saved(), ElementsAre());
}

// A hard mount of a file server that is gone: a write never returns.
TEST_F(SaverTest, AStorageThatHangsEndsTheSaveAndNotTheJob) {
  disk_.slow = true;
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    const auto begin = os::now();
    {
      Saver saver(borrowed(fabric), {.folder = "/f", .deadline = std::chrono::milliseconds(300)});
      try {
        saver.save(trained.state());
        ADD_FAILURE() << "it cannot have been saved";
      } catch (const SaveFailed& error) {
        EXPECT_THAT(error.what(), HasSubstr("not been written within 0.3 s; does the storage of /f hang?"));
      }
      trained.step();
      try {
        saver.save(trained.state());
        ADD_FAILURE() << "it cannot have been saved";
      } catch (const SaveFailed& error) {
        EXPECT_THAT(error.what(), HasSubstr("which was given up, still hangs in /f"));
      }
    }
    EXPECT_LT(os::now() - begin, std::chrono::seconds(60));
    fabric.everyone().barrier();
  });
  disk_.broken = disk_.dead = true;  // so that the threads left behind end as soon as the disk answers
  disk_.victim = "";
  disk_.slow = false;
  while (disk_.syncing > 0) os::sleep_for(std::chrono::milliseconds(1));
  os::sleep_for(std::chrono::milliseconds(200));
}

TEST_F(SaverTest, WhatIsCommittedIsSavedHoweverLongOlderOnesTakeToRemove) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    Saver saver(borrowed(fabric), {.folder = "/f", .keep = 1, .deadline = std::chrono::seconds(4)});
    for (int i = 0; i < 2; ++i) {
      trained.step();
      if (i == 1) disk_.slow_to_remove = true;
      saver.save(trained.state());
    }
  });
  EXPECT_THAT(saved(), ElementsAre(2));
}

TEST_F(SaverTest, AFolderThatIsAnothersIsSaidOnAllRanks) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 2}));
    Saver saver(borrowed(fabric), {.folder = "/f"});
    for (const bool taken : {true, false}) {
      saver.set_fence([taken] {
        if (taken) throw FolderTaken("fence", "it is another's");
        throw IoError("fence", "it cannot be read");
      });
      try {
        saver.save(trained.state());
        ADD_FAILURE() << "it cannot have been saved";
      } catch (const SaveFailed& error) {
        EXPECT_EQ(error.taken, taken) << error.what();
      }
    }
  });
  EXPECT_THAT(saved(), ElementsAre());
}

TEST_F(SaverTest, KeepsAsManyAsToldAcrossJobs) {
  for (int job = 0; job < 3; ++job) {
    comm::run_local(2, [&](comm::Fabric& fabric) {
      Trained trained(fabric, testing::NetOptions{}, with_degrees({1, 1, 1}));
      trained.set_steps(job * 10);
      Saver saver(borrowed(fabric), {.folder = "/f", .keep = 2});
      for (int i = 0; i < 3; ++i) {
        trained.step();
        saver.save(trained.state());
      }
    });
  }
  EXPECT_THAT(saved(), ElementsAre(22, 23));
}

TEST(Snapshot, ReusesItsMemory) {
  Snapshot snapshot;
  auto pieces = [](double value, int64_t size) {
    return std::vector<Piece>{replicated("a", at::full({size}, value), 0),
                              replicated("b", at::full({3}, value, at::kHalf), 0),
                              replicated("other", at::zeros({100}), 1)};
  };
  snapshot.begin(pieces(1, 1000));
  snapshot.copy();
  const char* memory = snapshot.sources()[0].data;
  EXPECT_EQ(snapshot.sources().size(), 2u);
  EXPECT_EQ(reinterpret_cast<const float*>(memory)[999], 1.0f);
  snapshot.begin(pieces(2, 900));
  snapshot.copy();
  EXPECT_EQ(snapshot.sources()[0].data, memory);
  EXPECT_EQ(reinterpret_cast<const float*>(memory)[899], 2.0f);
  snapshot.begin(pieces(3, 2000));
  snapshot.copy();
  EXPECT_GE(snapshot.bytes(), 8000);
  EXPECT_LE(snapshot.bytes(), 8200);
}

TEST(RandomState, ComesBack) {
  testing::MemoryFiles memory;
  const os::ScopedFiles scoped(memory);
  comm::run_local(1, [&](comm::Fabric& fabric) {
    at::manual_seed(5);
    at::rand({3});
    Saver saver(borrowed(fabric), {.folder = "/f"});
    saver.save({.step = 1, .layout = mesh::Layout(1, {}), .pieces = random_pieces(0, c10::kCPU)});
  });
  const at::Tensor expected = at::randn({7});
  at::manual_seed(6);
  const Checkpoint checkpoint = Checkpoint::open("/f/step-1");
  EXPECT_FALSE(load_random(checkpoint, 1, c10::kCPU));
  EXPECT_TRUE(load_random(checkpoint, 0, c10::kCPU));
  EXPECT_TRUE(at::randn({7}).equal(expected));
}

}  // namespace
}  // namespace tesserae::checkpoint
