#include "tesserae/monitor/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <numeric>
#include <sstream>

#include "tesserae/base/error.h"
#include "tesserae/os/memory.h"
#include "tests/shard/net.h"
#include "tests/support/ranks.h"

namespace tesserae::monitor {
namespace {

using namespace shard::testing;
using std::chrono::milliseconds;
using tesserae::testing::run_ranks;

/// A folder of its own for each test, taken away at the end.
class Folder {
 public:
  explicit Folder(const std::string& name) : path_(os::Path("/tmp") / cat("tesserae-monitor-", ::getpid(), "-", name)) {
    os::files().make_directories(path_);
  }
  ~Folder() { os::files().remove_all(path_); }
  const os::Path& path() const { return path_; }

 private:
  os::Path path_;
};

Json read_json(const os::Path& path) {
  return Json::parse(os::files().read(path));
}

std::vector<Json> events_of(const os::Path& run) {
  std::vector<Json> events;
  std::istringstream lines(os::files().read(run / "monitor/events.jsonl"));
  for (std::string line; std::getline(lines, line);) events.push_back(Json::parse(line));
  return events;
}

// args: folder, steps, milliseconds a step, what is done to rank 2 in step 20: "slow", "stop", "data" or "nothing".
RANK_MAIN(trains_watched) {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const int rank = fabric->rank(), ranks = fabric->size();
  const int64_t steps = std::stoll(args[1]);
  const milliseconds pace(std::stoi(args[2]));
  Monitor monitor(fabric, {.folder = args[0], .job = {{"steps", steps}}, .every = milliseconds(50)});
  const NetOptions options;
  Net net(options);
  fill_all(*net);
  shard::Options sharding;
  sharding.strategy = mesh::preset("FULL_SHARD", ranks);
  shard::Sharded sharded = shard::shard_model(net, fabric, sharding);
  monitor.watch(sharded.engine());
  for (int64_t step = 1; step <= steps; ++step) {
    const bool disturbed = rank == 2 && step >= 20;
    monitor.timer().enter(Stage::data);
    if (disturbed && args[3] == "data") os::sleep_for(4 * pace);
    if (disturbed && step == 20 && args[3] == "stop") {
      // A child lets this process go on again.
      const pid_t self = ::getpid();
      if (::fork() == 0) {
        ::usleep(800'000);
        ::kill(self, SIGCONT);
        ::_exit(0);
      }
      ::raise(SIGSTOP);
    }
    const Batch batch = batch_of(options, step, rank, ranks);
    monitor.timer().enter(Stage::forward);
    os::sleep_for(disturbed && args[3] == "slow" ? 5 * pace : pace);
    net(batch.tokens, batch.targets).backward();
    monitor.timer().enter(Stage::optimizer);
    sgd(sharded, 0.1);
    monitor.timer().end_step(step);
  }
  monitor.end("done");
  // Rank 0 has told of what it knew; the others' last reports may come later.
  fabric->everyone().barrier();
}

TEST(Monitor, WritesWhatAllRanksDo) {
  const Folder folder("writes");
  const auto results = run_ranks("trains_watched", 4, {folder.path().native(), "60", "20", "nothing"});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  const Json now = read_json(folder.path() / "monitor/now.json");
  EXPECT_EQ(now["state"], "ended");
  EXPECT_EQ(now["how"], "done");
  EXPECT_EQ(now["job"]["ranks"], 4);
  EXPECT_EQ(now["job"]["steps"], 60);
  EXPECT_GE(now["step"].get<int>(), 40);
  EXPECT_GE(now["step_seconds"].get<double>(), 0.02);
  ASSERT_EQ(now["seconds"].size(), 4U);
  for (int rank = 0; rank < 4; ++rank) {
    double sum = 0;
    for (const double seconds : now["seconds"][rank]) sum += seconds;
    EXPECT_GT(sum, 0.02);
    double sent = 0;
    for (const double bytes : now["traffic"]["bytes"][rank]) sent += bytes;
    EXPECT_GT(sent, 1000);
    // A rank's memory is all told, and most of it is not the little model's.
    const auto bytes = now["memory"]["bytes"][rank].get<std::vector<double>>();
    ASSERT_EQ(now["memory"]["categories"][6], "program");
    EXPECT_GT(bytes[6], 10e6);
    EXPECT_GT(bytes[0] + bytes[2] + bytes[5], 1000) << now["memory"];
  }
  const Json timeline = read_json(folder.path() / "monitor/timeline.json");
  EXPECT_EQ(timeline["ranks"].size(), 4U);
  EXPECT_THAT(timeline["units"], ::testing::SizeIs(4));
}

// Which of 50 jobs would be disturbed by this machine is for bench/ to show; here a culprit must be among the named.
TEST(Monitor, NamesTheRankThatIsSlowAndTheStage) {
  for (const auto& [what, stage] :
       {std::pair("slow", "forward"), std::pair("data", "data"), std::pair("stop", "data")}) {
    const Folder folder(what);
    const auto results = run_ranks("trains_watched", 4, {folder.path().native(), "60", "40", what});
    ASSERT_TRUE(results.all_succeeded()) << results.text();
    bool named = false;
    std::string all;
    for (const Json& event : events_of(folder.path())) {
      all += event.dump() + "\n";
      named = named || (event["kind"] == "slow" && event["rank"] == 2 && event["step"] >= 20 &&
                        event["text"].get<std::string>().find(cat(" in ", stage)) != std::string::npos);
    }
    EXPECT_TRUE(named) << what << "\n" << all;
  }
}

// args: folder. Rank 0 reads one report of many.
RANK_MAIN(is_read_seldom) {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  Monitor monitor(fabric, {.folder = args[0], .every = milliseconds(fabric->rank() == 0 ? 2000 : 20)});
  for (int64_t step = 1; step <= 250; ++step) {
    monitor.timer().enter(Stage::data);
    os::sleep_for(milliseconds(fabric->rank() == 1 && step == 60 ? 500 : 8));
    monitor.timer().enter(Stage::forward);
    fabric->everyone().barrier();
    monitor.timer().end_step(step);
  }
  monitor.end("done");
}

TEST(Monitor, NoStepIsLostHoweverSeldomRankZeroReads) {
  const Folder folder("seldom");
  const auto results = run_ranks("is_read_seldom", 2, {folder.path().native()});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  std::string all;
  for (const Json& event : events_of(folder.path())) all += event.dump() + "\n";
  EXPECT_THAT(all, ::testing::ContainsRegex("rank 1 takes 0\\.[0-9]+ s longer than the others in data"));
}

// args: folder
RANK_MAIN(is_lost_while_watched) {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment(), [] {
    comm::FabricOptions options;
    options.deadline = std::chrono::seconds(20);
    return options;
  }());
  Monitor monitor(fabric, {.folder = args[0], .every = milliseconds(50)});
  for (int64_t step = 1;; ++step) {
    monitor.timer().enter(Stage::forward);
    os::sleep_for(milliseconds(20));
    if (fabric->rank() == 1 && step == 10) ::raise(SIGKILL);
    fabric->everyone().barrier();
    monitor.timer().end_step(step);
  }
}

// args: folder
RANK_MAIN(hangs_for_a_while) {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  Monitor monitor(fabric, {.folder = args[0], .every = milliseconds(50)});
  for (int64_t step = 1; step <= 40; ++step) {
    monitor.timer().enter(Stage::data);
    os::sleep_for(fabric->rank() == 1 && step == 20 ? std::chrono::seconds(15) : milliseconds(10));
    monitor.timer().enter(Stage::forward);
    fabric->everyone().barrier();
    monitor.timer().end_step(step);
  }
  monitor.end("done");
}

TEST(Monitor, AHangIsNamedWithTheStacksOfAllRanks) {
  const Folder folder("hangs");
  const auto results = run_ranks("hangs_for_a_while", 2, {folder.path().native()});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  std::string hang;
  for (const Json& event : events_of(folder.path())) {
    if (event["kind"] == "hang") hang += event["text"].get<std::string>();
  }
  EXPECT_THAT(hang, ::testing::HasSubstr("nothing has happened in step 20 for"));
  EXPECT_THAT(hang, ::testing::HasSubstr("rank 1 is in data of step 20; 1 rank waits"));
  const auto stacks_of = [&](int rank) {
    return os::files().read(folder.path() / cat("monitor/stacks-", rank, ".txt"));
  };
#ifdef __SANITIZE_THREAD__  // it keeps signals back until a call of its own ends, and stacks then begin there
  for (const int rank : {0, 1}) EXPECT_THAT(stacks_of(rank), ::testing::HasSubstr("thread "));
#else
  EXPECT_THAT(stacks_of(0), ::testing::HasSubstr("Group::barrier"));
  EXPECT_THAT(stacks_of(1), ::testing::HasSubstr("os::sleep_for"));
#endif
}

// One after the other on the same fabric, as after tsm.uninstall() and tsm.init(): what the first left in the store
// does not count.
RANK_MAIN(is_watched_twice) {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  for (const int64_t steps : {40, 10}) {
    Monitor monitor(fabric, {.every = milliseconds(20)});
    for (int64_t step = 1; step <= steps; ++step) {
      monitor.timer().enter(Stage::forward);
      os::sleep_for(milliseconds(10));
      fabric->everyone().barrier();
      monitor.timer().end_step(step);
    }
    const os::Deadline deadline(std::chrono::seconds(30));
    while (monitor.status()["step"] < steps && !deadline.passed()) os::sleep_for(milliseconds(20));
    EXPECT_EQ(monitor.status()["step"], steps);
    fabric->everyone().barrier();
  }
}

TEST(Monitor, OneAfterTheOtherDoNotMix) {
  const auto results = run_ranks("is_watched_twice", 2);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Monitor, AJobThatFailsSaysSo) {
  const Folder folder("fails");
  const auto results = run_ranks("is_lost_while_watched", 2, {folder.path().native()});
  EXPECT_FALSE(results.all_succeeded());
  const Json now = read_json(folder.path() / "monitor/now.json");
  EXPECT_EQ(now["state"], "ended");
  EXPECT_EQ(now["how"], "failed");
}

TEST(Monitor, WhatMemoryIsTakenByIsAllThereIs) {
  constexpr size_t data = 96 << 20, kept = 48 << 20;
  const std::vector<char> before(data, 1);
  const auto fabric = comm::Fabric::null(mesh::World::single_host(0, 1));
  Net net(NetOptions{});
  fill_all(*net);
  shard::Options sharding;
  sharding.strategy = mesh::preset("FULL_SHARD", 1);
  shard::Sharded sharded = shard::shard_model(net, fabric, sharding);
  Monitor monitor(fabric, {.every = milliseconds(20), .optimizer_bytes = [] { return 4096.0; }});
  monitor.watch(sharded.engine());
  const std::vector<char> since(kept, 1);
  monitor.timer().enter(Stage::forward);
  monitor.timer().end_step(1);
  const auto bytes = [&monitor] { return monitor.status()["memory"]["bytes"][0].get<std::vector<double>>(); };
  const os::Deadline deadline(std::chrono::seconds(60));
  while (bytes().back() == 0 && !deadline.passed()) os::sleep_for(milliseconds(20));
  const auto held = static_cast<double>(os::process_memory().proportional);
  const std::vector<double> all = bytes();
  EXPECT_NEAR(std::accumulate(all.begin(), all.end(), 0.0) / held, 1, 0.02);
  EXPECT_GT(all[6], data) << "program";
  EXPECT_LT(all[6], held - static_cast<double>(kept) * 0.9);
#ifndef __SANITIZE_THREAD__  // which notes each byte that is written, in memory of its own
  EXPECT_NEAR(all[7] / kept, 1, 0.2) << "other";
#endif
  EXPECT_EQ(all[3], 4096) << "optimizer";
  EXPECT_EQ(before[1] + since[1], 2);
}

// What a script adds may fail, as other things of the process may: that is no reason to look dead.
TEST(Monitor, WhatFailsInARoundDoesNotEndIt) {
  const Folder folder("throws");
  const auto fabric = comm::Fabric::null(mesh::World::single_host(0, 1));
  Monitor monitor(fabric, {.folder = folder.path(), .every = milliseconds(20), .more_stacks = []() -> std::string {
                             throw std::runtime_error("no frames to be had");
                           }});
  monitor.set_job("name", "not UTF-8: \xff");
  const os::Descriptor connection = os::connect_local(folder.path() / socket_name);
  ASSERT_TRUE(connection);
  os::send_some(connection.get(), "{\"ask\": \"stacks\"}\n");
  const os::Path stacks = folder.path() / "monitor/stacks-0.txt";
  const os::Deadline deadline(std::chrono::seconds(30));
  while (!os::files().exists(stacks) && !deadline.passed()) os::sleep_for(milliseconds(20));
  ASSERT_TRUE(os::files().exists(stacks));
  EXPECT_THAT(os::files().read(stacks), ::testing::HasSubstr("no frames to be had"));
  EXPECT_THAT(os::files().read(stacks), ::testing::HasSubstr("Monitor::run")) << "the other stacks are there";
  monitor.end("done");
  const Json now = read_json(folder.path() / "monitor/now.json");
  EXPECT_EQ(now["state"], "ended");
  EXPECT_EQ(now["how"], "done");
}

TEST(Monitor, OfOneProcessNeedsNobody) {
  const Folder folder("alone");
  const auto fabric = comm::Fabric::null(mesh::World::single_host(0, 1));
  Monitor monitor(fabric, {.folder = folder.path(), .every = milliseconds(20)});
  for (int64_t step = 1; step <= 5; ++step) {
    monitor.timer().enter(Stage::forward);
    os::sleep_for(milliseconds(5));
    monitor.timer().end_step(step);
  }
  monitor.tell({.step = 5, .kind = "checkpoint", .rank = -1, .text = "step 5 is saved"});
  monitor.set_job("degrees", {1, 1, 1});
  monitor.end("done");
  monitor.end("again");
  EXPECT_EQ(monitor.status()["step"], 5);
  const Json now = read_json(folder.path() / "monitor/now.json");
  EXPECT_EQ(now["how"], "done");
  EXPECT_EQ(now["job"]["degrees"][0], 1);
  ASSERT_EQ(events_of(folder.path()).size(), 1U);
  EXPECT_EQ(events_of(folder.path())[0]["text"], "step 5 is saved");
}

}  // namespace
}  // namespace tesserae::monitor
