#include "tesserae/snapshot/host_copies.h"

#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"
#include "tesserae/os/shared_memory.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/snapshot/memory_tier.h"
#include "tests/support/ranks.h"

// Real ranks that say of themselves on which host they are, and share one /dev/shm in truth: what is lost with a host,
// the test takes away.

namespace tesserae::snapshot {
namespace {

using tesserae::testing::RankArgs;
using tesserae::testing::report;
using tesserae::testing::run_ranks;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> keepers_of(const std::vector<std::string>& hosts, const mesh::Degrees& degrees, int tensor = 1) {
  const int ranks = static_cast<int>(hosts.size());
  const mesh::World world = mesh::World::single_host(0, ranks).with_hosts(hosts);
  return keepers(world, mesh::Mesh(ranks, {.tensor = tensor}), mesh::Layout(ranks / tensor, degrees));
}

TEST(Keepers, AreOfTheNextHost) {
  EXPECT_THAT(keepers_of({"a", "a", "b", "b"}, {4, 4, 4}), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(keepers_of({"a", "a", "b", "b", "c", "c"}, {6, 6, 6}), ElementsAre(2, 3, 4, 5, 0, 1));
  EXPECT_THAT(keepers_of({"a", "a", "b", "b"}, {1, 2, 2}, 2), ElementsAre(2, 3, 0, 1)) << "two tensor-parallel ranks";
}

TEST(Keepers, SomeKeepForSeveralWhereHostsDiffer) {
  EXPECT_THAT(keepers_of({"a", "a", "a", "b"}, {4, 4, 4}), ElementsAre(3, 3, 3, 0));
}

TEST(Keepers, AreNotNeededWhereTheNeighbourIsOnAnotherHost) {
  EXPECT_THAT(keepers_of({"a", "a", "b", "b"}, {2, 2, 2}), Each(-1));
  EXPECT_THAT(keepers_of({"a", "a", "b", "b"}, {1, 1, 1}), ElementsAre(2, -1, 0, -1)) << "rank 1's neighbour is 2";
}

TEST(Keepers, ThereAreNoneOnOneHost) {
  EXPECT_THAT(keepers_of({"a", "a", "a", "a"}, {4, 4, 4}), Each(-1));
}

/// A job of two hosts, or what is left of it.
class Job {
 public:
  Job(const std::string& host, const mesh::Degrees& degrees, const std::string& folder)
      : fabric_(comm::Fabric::connect(mesh::World::from_environment(), {.backend = "gloo", .host = host})),
        layout_(fabric_->size(), degrees),
        sharded_(shard::shard_model(model_, fabric_, {.strategy = {.degrees = degrees}})),
        optimizer_(sharded_, {}),
        tier({std::make_shared<comm::MeshFabric>(fabric_), sharded_, optimizer_}, layout_, folder) {}

  void step(int64_t number) {
    at::manual_seed(number * 100 + fabric_->rank());
    const at::Tensor tokens = at::randint(16, {1, 4}, at::kLong);
    sharded_.zero_grad();
    model_->forward(tokens, tokens).backward();
    tier.wait_copied();
    optimizer_.step({});
  }

  void save_to(const std::string& folder, int64_t step) {
    checkpoint::Saver saver(fabric_, {.folder = folder});
    saver.save({.step = step, .layout = layout_, .pieces = checkpoint::model_pieces(sharded_, &optimizer_)});
  }

  /// The state as a checkpoint has it, as far as this rank holds it.
  std::vector<at::Tensor> load(const os::Path& checkpoint) {
    checkpoint::load_chosen(*fabric_, checkpoint, [&](const checkpoint::Checkpoint& from) {
      checkpoint::load_model(from, sharded_, &optimizer_);
    });
    std::vector<at::Tensor> values;
    for (const checkpoint::Piece& piece : checkpoint::model_pieces(sharded_, &optimizer_)) {
      values.push_back(piece.data.clone());
    }
    return values;
  }

  void wait_until_elsewhere() {
    while (!tier.is_elsewhere()) os::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::shared_ptr<comm::Fabric> fabric_;
  mesh::Layout layout_;
  model::Gpt model_{model::GptConfig{.vocabulary = 16, .dimension = 8, .layers = 2, .heads = 1}};
  shard::Sharded sharded_;
  optim::AdamW optimizer_;

 public:
  MemoryTier tier;
};

std::string host_of(int rank) {
  return rank < 2 ? "a" : "b";
}

std::string prefix_of(const std::string& folder) {
  return cat("tesserae-", to_hex(checksum(folder)), "-");
}

/// What of the snapshots of `folder` host "a" has in its memory.
std::vector<std::string> memory_of_first_host(const std::string& folder) {
  std::vector<std::string> names;
  for (const std::string& name : os::SharedMemory::names(prefix_of(folder))) {
    const size_t at = name.find("rank-") + std::string_view("rank-").size();
    const bool of_first = host_of(std::stoi(name.substr(at))) == "a", kept = name.ends_with(kept_suffix);
    if (of_first != kept) names.push_back(name);
  }
  return names;
}

// Steps 1 to `steps`, each saved in memory; the last two to storage, too. The processes end without taking anything
// away.
RANK_MAIN(loses_its_job) {
  const std::string& folder = args[0];
  const int64_t steps = std::stoll(args[1]);
  const int launched = mesh::World::from_environment().rank();
  Job job(host_of(launched), {4, 4, 4}, folder + "/checkpoints");
  for (int64_t step = 1; step <= steps; ++step) {
    job.step(step);
    job.tier.save(step, {{"of", step}});
    if (step >= steps - 1) job.save_to(folder + "/expected", step);
    job.wait_until_elsewhere();
  }
  report("sent", static_cast<double>(job.tier.figures().sent.bytes));
  report("own", static_cast<double>(job.tier.figures().bytes));
}

// All of its ranks are started again, and go on from memory.
RANK_MAIN(goes_on) {
  const std::string& folder = args[0];
  const int launched = mesh::World::from_environment().rank();
  Job job(host_of(launched), {4, 4, 4}, folder + "/checkpoints");
  const auto restored = job.tier.restore(0);
  ASSERT_TRUE(restored.has_value());
  job.wait_until_elsewhere();
}

// The second host's ranks are a job of their own now.
RANK_MAIN(goes_on_without_the_first_host) {
  const std::string& folder = args[0];
  Job job("b", {2, 2, 2}, folder + "/checkpoints");
  const auto step = job.tier.save_surviving(0);
  ASSERT_TRUE(step.has_value());
  report("step", static_cast<double>(*step));
  const auto found = job.load(folder + "/checkpoints");
  const auto expected = job.load(cat(folder, "/expected/step-", *step));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  job.tier.remove_all();
}

RANK_MAIN(ends_well) {
  const int launched = mesh::World::from_environment().rank();
  Job job(host_of(launched), {4, 4, 4}, args[0] + "/checkpoints");
  for (int64_t step = 1; step <= 4; ++step) {
    job.step(step);
    job.tier.save(step, {}, /*last=*/step == 4);
  }
  job.tier.remove();
}

class HostIsLost : public ::testing::Test {
 protected:
  ~HostIsLost() override {
    for (const std::string& name : all()) os::SharedMemory::remove(name);
    os::files().remove_all(folder_);
  }

  std::vector<std::string> all() const { return os::SharedMemory::names(prefix_of(folder_ + "/checkpoints")); }
  std::string name_of(int rank, int slot, bool kept) const {
    return cat(prefix_of(folder_ + "/checkpoints"), "-rank-", rank, "-", slot, kept ? kept_suffix : "");
  }
  static int64_t step_of(const std::string& name) {
    const auto snapshot = SnapshotBuffer(name).read();
    return snapshot ? snapshot->manifest.step : -1;
  }

  void train(int64_t steps) {
    const auto results = run_ranks("loses_its_job", 4, {folder_, std::to_string(steps)});
    ASSERT_TRUE(results.all_succeeded()) << results.text();
    for (int rank = 0; rank < 4; ++rank) {
      const double sent = static_cast<double>(steps) * results[rank].value("own");
      EXPECT_NEAR(results[rank].value("sent"), sent, static_cast<double>(steps) * 4096) << rank;
    }
  }
  void lose_the_first_host() {
    for (const std::string& name : memory_of_first_host(folder_ + "/checkpoints")) os::SharedMemory::remove(name);
  }
  /// From which step the other one goes on, with the values of that step.
  double others_go_on() {
    const auto results = run_ranks("goes_on_without_the_first_host", 2, {folder_});
    EXPECT_TRUE(results.all_succeeded()) << results.text();
    EXPECT_THAT(all(), IsEmpty());
    return results[0].value("step");
  }

  const std::string folder_ = cat("/tmp/tesserae-host-copies-", ::getpid());
};

class HostIsLostAfter : public HostIsLost, public ::testing::WithParamInterface<int64_t> {};

TEST_P(HostIsLostAfter, TheOtherHasAllOfTheState) {
  train(GetParam());
  EXPECT_EQ(memory_of_first_host(folder_ + "/checkpoints").size(), 4 * std::min<size_t>(2, GetParam()));
  lose_the_first_host();
  EXPECT_EQ(others_go_on(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Steps, HostIsLostAfter, ::testing::Values(1, 2, 5));

TEST_F(HostIsLost, WhileTheNewestIsOnItsWayTheOneBeforeCounts) {
  train(3);
  for (const std::string& name : all()) {
    if (name.ends_with("rank-1-0-kept") || name.ends_with("rank-1-1-kept")) {
      if (step_of(name) == 3) os::SharedMemory::remove(name);
    }
  }
  lose_the_first_host();
  EXPECT_EQ(others_go_on(), 2);
}

// A process that took another one's place writes to the other slot.
TEST_F(HostIsLost, OwnAndKeptNeedNotBeInTheSameSlots) {
  train(3);
  const std::string first = "/dev/shm/" + name_of(0, 0, true), second = "/dev/shm/" + name_of(0, 1, true);
  std::filesystem::rename(first, first + "-");
  std::filesystem::rename(second, first);
  std::filesystem::rename(first + "-", second);
  for (const std::string& name : all()) {
    if (name.find("-rank-2-") != std::string::npos && step_of(name) == 3) os::SharedMemory::remove(name);
  }
  EXPECT_EQ(others_go_on(), 2);
}

TEST_F(HostIsLost, WhoGoesOnFromMemorySendsWhatOthersLack) {
  train(2);
  for (const std::string& name : all()) {
    if (name.ends_with(kept_suffix)) os::SharedMemory::remove(name);
  }
  const auto results = run_ranks("goes_on", 4, {folder_});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  lose_the_first_host();
  EXPECT_EQ(others_go_on(), 2);
}

TEST_F(HostIsLost, BothHaveItTwiceAndItIsWrittenOnce) {
  train(2);
  EXPECT_EQ(others_go_on(), 2);
}

TEST_F(HostIsLost, AJobThatEndsWellLeavesNothing) {
  const auto results = run_ranks("ends_well", 4, {folder_});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  EXPECT_THAT(all(), IsEmpty());
}

// The host has no room for what it is to keep: it says so before anything is sent.
RANK_MAIN(has_no_room_to_keep) {
  const int launched = mesh::World::from_environment().rank();
  const auto fabric =
      comm::Fabric::connect(mesh::World::from_environment(), {.backend = "gloo", .host = launched == 0 ? "a" : "b"});
  HostCopies copies(fabric, args[0]);
  copies.use({1, 0});
  if (launched == 1) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{4096, 4096};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
    EXPECT_THROW(copies.prepare({{.bytes = 1 << 20}, {.bytes = 1 << 20}}), IoError);
  } else {
    copies.prepare({{.bytes = 1 << 20}, {.bytes = 1 << 20}});
  }
  copies.give_up();
  EXPECT_FALSE(copies.any());
  copies.use({1, 0});
  EXPECT_FALSE(copies.any()) << "once and for all";
}

TEST(HostCopies, WithoutRoomNothingIsKept) {
  const std::string prefix = cat("tesserae-no-room-", ::getpid(), "-rank-");
  const auto results = run_ranks("has_no_room_to_keep", 2, {prefix});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  EXPECT_TRUE(os::SharedMemory::names(prefix).empty());
}

}  // namespace
}  // namespace tesserae::snapshot
