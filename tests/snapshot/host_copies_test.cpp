#include "tesserae/snapshot/host_copies.h"

#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
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

  const comm::Fabric& fabric() const { return *fabric_; }
  const mesh::Layout& layout() const { return layout_; }

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

// Steps 1 to `steps`, each saved in memory; the last to storage, too. The processes end without taking anything away.
RANK_MAIN(loses_its_job) {
  const std::string& folder = args[0];
  const int64_t steps = std::stoll(args[1]);
  const int launched = mesh::World::from_environment().rank();
  Job job(host_of(launched), {4, 4, 4}, folder + "/checkpoints");
  for (int64_t step = 1; step <= steps; ++step) {
    job.step(step);
    job.tier.save(step, {{"of", step}});
  }
  job.save_to(folder + "/expected", steps);
  job.tier.layout_changed(job.layout());  // all have what they keep
  report("sent", static_cast<double>(job.tier.figures().sent.bytes));
  report("own", static_cast<double>(job.tier.figures().bytes));
}

// The second host's ranks are a job of their own now.
RANK_MAIN(goes_on_without_the_first_host) {
  const std::string& folder = args[0];
  Job job("b", {2, 2, 2}, folder + "/checkpoints");
  const auto step = job.tier.save_surviving(0);
  ASSERT_TRUE(step.has_value());
  report("step", static_cast<double>(*step));
  const auto found = job.load(folder + "/checkpoints"), expected = job.load(folder + "/expected");
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  job.tier.remove_all();
}

class HostIsLost : public ::testing::TestWithParam<int> {
 protected:
  ~HostIsLost() override {
    for (const std::string& name : os::SharedMemory::names(prefix_of(folder_ + "/checkpoints"))) {
      os::SharedMemory::remove(name);
    }
    os::files().remove_all(folder_);
  }

  const std::string folder_ = cat("/tmp/tesserae-host-copies-", ::getpid());
};

TEST_P(HostIsLost, TheOtherHasAllOfTheState) {
  const auto before = run_ranks("loses_its_job", 4, {folder_, std::to_string(GetParam())});
  ASSERT_TRUE(before.all_succeeded()) << before.text();
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_NEAR(before[rank].value("sent"), GetParam() * before[rank].value("own"), GetParam() * 4096) << rank;
  }
  const auto lost = memory_of_first_host(folder_ + "/checkpoints");
  EXPECT_EQ(lost.size(), 4 * std::min<size_t>(buffers_per_rank, static_cast<size_t>(GetParam())));
  for (const std::string& name : lost) EXPECT_TRUE(os::SharedMemory::remove(name));

  const auto after = run_ranks("goes_on_without_the_first_host", 2, {folder_});
  ASSERT_TRUE(after.all_succeeded()) << after.text();
  EXPECT_EQ(after[0].value("step"), GetParam());
  EXPECT_TRUE(os::SharedMemory::names(prefix_of(folder_ + "/checkpoints")).empty());
}

TEST_P(HostIsLost, BothHaveItTwiceAndItIsWrittenOnce) {
  const auto before = run_ranks("loses_its_job", 4, {folder_, std::to_string(GetParam())});
  ASSERT_TRUE(before.all_succeeded()) << before.text();
  const auto after = run_ranks("goes_on_without_the_first_host", 2, {folder_});
  ASSERT_TRUE(after.all_succeeded()) << after.text();
  EXPECT_EQ(after[0].value("step"), GetParam());
}

INSTANTIATE_TEST_SUITE_P(AfterSteps, HostIsLost, ::testing::Values(1, 2, 5));

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
    EXPECT_THROW(copies.prepare(0, {1 << 20, 1 << 20}), IoError);
  } else {
    copies.prepare(0, {1 << 20, 1 << 20});
  }
  copies.give_up();
  EXPECT_FALSE(copies.any());
  copies.end();
}

TEST(HostCopies, WithoutRoomNothingIsKept) {
  const std::string prefix = cat("tesserae-no-room-", ::getpid(), "-rank-");
  const auto results = run_ranks("has_no_room_to_keep", 2, {prefix});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  EXPECT_TRUE(os::SharedMemory::names(prefix).empty());
}

}  // namespace
}  // namespace tesserae::snapshot
