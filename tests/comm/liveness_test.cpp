#include "tesserae/comm/liveness/liveness.h"

#include <gtest/gtest.h>

#include <csignal>
#include <future>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tesserae/comm/fabric.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/host.h"
#include "tesserae/os/process.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Another store, whose requests wait while somebody has the gate: a store whose host is swapping.
class StallingStore : public c10d::Store {
 public:
  explicit StallingStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  std::mutex gate;
  std::atomic<bool> gone = false;  ///< with the host that served it

  c10::intrusive_ptr<c10d::Store> clone() override { return store_->clone(); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    behind([&] { store_->set(key, value); });
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return behind([&] { return store_->get(key); });
  }
  int64_t add(const std::string& key, int64_t value) override {
    return behind([&] { return store_->add(key, value); });
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override {
    return behind([&] { return store_->check(keys); });
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override { store_->wait(keys, timeout); }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    behind([&] { store_->append(key, value); });
  }
  bool hasExtendedApi() const override { return true; }

 private:
  template <class Request>
  std::invoke_result_t<Request> behind(const Request& request) {
    { const std::lock_guard wait(gate); }
    if (gone) throw std::runtime_error("the connection was closed");
    return request();
  }
  c10::intrusive_ptr<c10d::Store> store_;
};

/// A group of ranks 0 and 1 over shared memory that has waited for rank 1 since it was made.
class WaitingGroup : public Watched {
 public:
  std::future<Verdict> verdict() { return verdict_.get_future(); }

 private:
  const std::string& watched_name() const override { return name_; }
  const std::vector<int>& watched_members() const override { return members_; }
  milliseconds watched_deadline() const override { return std::chrono::hours(1); }
  bool notices_departures() const override { return false; }
  std::optional<Pending> pending() const override { return Pending{1, "barrier", since_}; }
  void abort(const Verdict& verdict) override { verdict_.set_value(verdict); }

  std::string name_ = "waiting";
  std::vector<int> members_ = {0, 1};
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::promise<Verdict> verdict_;
};

c10::intrusive_ptr<c10d::Store> store_of(int ranks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < ranks; ++rank) Liveness::introduce(rank, store);
  return store;
}

c10::intrusive_ptr<c10d::Store> store_of_two() {
  return store_of(2);
}

mesh::World world_of_two(int rank) {
  return mesh::World::joined(rank, 2, /*served=*/false).with_hosts({"here", "there"});
}

TEST(Liveness, OneThatLeavesWhileItIsWaitedForIsLost) {
  const auto store = store_of_two();
  Liveness own(world_of_two(0), store, -1), other(world_of_two(1), store, -1);
  WaitingGroup group;
  auto verdict = group.verdict();
  own.watch(&group);
  EXPECT_EQ(verdict.wait_for(seconds(1)), std::future_status::timeout) << "it may come yet";
  other.leave();
  ASSERT_EQ(verdict.wait_for(seconds(10)), std::future_status::ready);
  EXPECT_EQ(verdict.get().ranks, std::vector<int>{1});
  own.forget(&group);
}

// Rank 2 is lost, and its host served the store. Rank 1 has heard of that while it computed, and has given up: it
// cannot say so. Rank 0, which waits for it in a group without rank 2, would wait until the deadline.
TEST(Liveness, WhereTheStoreIsGoneWithALostRankNobodyIsWaitedForLong) {
  const auto store = store_of(3);
  const auto served = c10::make_intrusive<StallingStore>(store);
  Liveness own(mesh::World::joined(0, 3, /*served=*/true).with_hosts({"here", "here too", "there"}), served, -1);
  WaitingGroup group;
  auto verdict = group.verdict();
  own.watch(&group);
  LivenessStore(store).report_lost(2);
  EXPECT_EQ(verdict.wait_for(seconds(2)), std::future_status::timeout) << "rank 1 can say so yet";
  EXPECT_EQ(own.lost(), std::vector<int>{2});
  served->gone = true;
  ASSERT_EQ(verdict.wait_for(seconds(20)), std::future_status::ready);
  const Verdict given = verdict.get();
  EXPECT_EQ(given.kind, Verdict::Kind::lost);
  EXPECT_EQ(given.ranks, std::vector<int>{2});
  own.forget(&group);
}

TEST(Liveness, AStoreThatStalledIsAskedAgainOnceItAnswers) {
  const auto store = store_of_two();
  const auto stalling = c10::make_intrusive<StallingStore>(store);
  Liveness own(world_of_two(0), stalling, -1), other(world_of_two(1), store, -1);
  WaitingGroup group;
  auto verdict = group.verdict();
  own.watch(&group);
  {
    const std::lock_guard stall(stalling->gate);
    os::sleep_for(milliseconds(3500));  // more than a request is given
  }
  other.leave();
  ASSERT_EQ(verdict.wait_for(seconds(10)), std::future_status::ready) << "it still hears who leaves";
  EXPECT_EQ(verdict.get().ranks, std::vector<int>{1});
  own.forget(&group);
}

TEST(Liveness, WhoIsLostWhileTheStoreStallsIsToldOfOnceItAnswers) {
  const auto store = store_of_two();
  os::Process peer = os::Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
  LivenessStore(store).introduce(1, {os::host_identity(), peer.id(), os::start_time(peer.id()).value()});
  const auto stalling = c10::make_intrusive<StallingStore>(store);
  const Liveness own(mesh::World::single_host(0, 2), stalling, -1);
  {
    const std::lock_guard stall(stalling->gate);
    os::sleep_for(milliseconds(3500));  // more than a request is given
    peer.signal(SIGKILL);
    for (const os::Deadline deadline(seconds(20)); own.lost().empty() && !deadline.passed();) {
      os::sleep_for(milliseconds(10));
    }
    ASSERT_EQ(own.lost(), std::vector<int>{1});
  }
  for (const os::Deadline deadline(seconds(20)); LivenessStore(store).gone().lost.empty() && !deadline.passed();) {
    os::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(LivenessStore(store).gone().lost, std::vector<int>{1});
}

}  // namespace

// args: port of a store that outlives the ranks, whether rank 1 falls.
RANK_MAIN(meets_on_a_store_of_others) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(args[0]));
  options.waitWorkers = false;
  const auto world = mesh::World::from_environment();
  const auto fabric =
      Fabric::join(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options), world.rank(), world.size(), true, {});
  fabric->everyone().barrier();
  if (args[1] == "falls" && fabric->rank() == 1) std::raise(SIGKILL);
  fabric->everyone().barrier();
}

// As torchrun does it with one store for all starts of a job: the rank that fell in the first one is not lost in the
// second.
TEST(Restart, RanksThatAreStartedAgainDoNotHearOfThoseBefore) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
  const std::string port = std::to_string(store.getPort());
  testing::RankJob job{.main = "meets_on_a_store_of_others", .args = {port, "falls"}};
  job.environment = {{"TORCHELASTIC_RESTART_COUNT", "0"}};
  const testing::RankResults before = testing::run_ranks(job);
  EXPECT_NE(before.text().find("rank 1 is lost"), std::string::npos) << before.text();
  job.args = {port, "stays"};
  job.environment = {{"TORCHELASTIC_RESTART_COUNT", "1"}};
  const testing::RankResults after = testing::run_ranks(job);
  EXPECT_TRUE(after.all_succeeded()) << after.text();
}

// args: none.
RANK_MAIN(meets_on_a_store_of_rank_0) {
  if (mesh::World::from_environment().launch().rank == 1) ::setenv("TORCHELASTIC_RESTART_COUNT", "0", 1);
  FabricOptions options;
  options.connect_deadline = seconds(20);
  Fabric::connect(mesh::World::from_environment(), options)->everyone().barrier();
}

// One host's ranks have failed before, another host is new.
TEST(Restart, HostsThatCountTheirOwnFailuresMeet) {
  testing::RankJob job{.main = "meets_on_a_store_of_rank_0"};
  job.environment = {{"TORCHELASTIC_RESTART_COUNT", "1"}};
  const testing::RankResults results = testing::run_ranks(job);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace tesserae::comm
