#include "tesserae/dial/dial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/dial/client.h"
#include "tesserae/os/memory.h"
#include "tests/os/memory_of_host.h"
#include "tests/os/scratch.h"
#include "tests/support/ranks.h"

// The controller, among ranks that are threads. Nothing is really moved here: what a caller of the Dial does with its
// answers is what tests/train checks.

namespace tesserae::dial {
namespace {

using mesh::Degrees;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Change = std::pair<int64_t, Degrees>;

std::shared_ptr<comm::Fabric> not_owned(comm::Fabric& fabric) {
  return {std::shared_ptr<void>(), &fabric};
}

/// Each rank has sent something else.
shard::Resharding done(const comm::Fabric& fabric, const Degrees& from, const Degrees& to) {
  shard::Resharding change;
  change.from.degrees = from;
  change.to.degrees = to;
  change.seconds = 0.25;
  change.bytes = 3'000'000 * static_cast<uint64_t>(1 + fabric.rank());
  return change;
}

/// Each rank's changes over `steps` steps; `at_step` runs on rank 0 before the edge.
std::vector<std::vector<Change>> run(int ranks, int64_t steps, const DialOptions& options, Degrees begin = {},
                                     const std::function<void(int64_t)>& at_step = {}, int64_t first = 1) {
  std::vector<std::vector<Change>> changes(static_cast<size_t>(ranks));
  comm::run_local(ranks, [&](comm::Fabric& fabric) {
    DialOptions own = options;
    own.facts = cost::facts_of(fabric);
    own.facts.parameters = options.facts.parameters;
    Dial dial(not_owned(fabric), {.degrees = begin}, own);
    for (int64_t step = first; step < first + steps; ++step) {
      if (fabric.rank() == 0 && at_step) at_step(step);
      const auto to = dial.at_step_edge(step, 0.1 + 0.01 * fabric.rank());
      EXPECT_DOUBLE_EQ(dial.seen().seconds, 0.1 + 0.01 * (ranks - 1)) << "of the slowest rank";
      EXPECT_GT(dial.seen().memory, 1e6);
      EXPECT_GT(dial.seen().place, 1e8);
      EXPECT_LT(dial.seen().free, dial.seen().place);
      if (!to) continue;
      changes[static_cast<size_t>(fabric.rank())].emplace_back(step, to->degrees);
      dial.changed(done(fabric, dial.setting().degrees, to->degrees));
    }
  });
  for (const auto& of_rank : changes) EXPECT_EQ(of_rank, changes[0]) << "all ranks hear the same";
  return changes;
}

TEST(Dial, FollowsTheSchedule) {
  DialOptions options;
  std::vector<std::string> said;
  options.say = [&](const std::string& line) { said.push_back(line); };
  options.schedule = {{3, {2, 2, 2}}, {5, {1, 2, 4}}, {6, {1, 2, 4}}};
  EXPECT_THAT(run(4, 8, options)[0], ElementsAre(Change(3, {2, 2, 2}), Change(5, {1, 2, 4})));
  EXPECT_THAT(said, ElementsAre("step 3: P=1 G=1 O=1 -> P=2 G=2 O=2 in 0.250 s, 30.0 MB moved (as scheduled)",
                                "step 5: P=2 G=2 O=2 -> P=1 G=2 O=4 in 0.250 s, 30.0 MB moved (as scheduled)"))
      << "what all ranks sent";
}

TEST(Dial, TellsOfChangesThatTheScriptMakes) {
  DialOptions options;
  std::vector<std::string> said;
  options.say = [&](const std::string& line) { said.push_back(line); };
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Dial dial(not_owned(fabric), {}, options);
    EXPECT_FALSE(dial.at_step_edge(1, 0.1));
    dial.changed(done(fabric, {1, 1, 1}, {2, 2, 2}));
    EXPECT_FALSE(dial.at_step_edge(2, 0.1));
    EXPECT_EQ(dial.setting().degrees, (Degrees{2, 2, 2}));
    EXPECT_EQ(dial.figures().bytes, 9e6) << "of all ranks, on each";
  });
  EXPECT_THAT(said, ElementsAre("step 1: P=1 G=1 O=1 -> P=2 G=2 O=2 in 0.250 s, 9.0 MB moved (by the script)"));
}

TEST(Dial, RaisesTheDegreeWhenTheHostIsNearlyFull) {
  // Less in all than what limits a container here, and a twentieth of it free.
  os::MemoryOfHost full(os::files(), "MemTotal: 1000000 kB\nMemAvailable: 50000 kB\n");
  const os::ScopedFiles scope(full);
  DialOptions options;
  std::vector<std::string> said;
  options.say = [&](const std::string& line) { said.push_back(line); };
  options.automatic = true;
  options.links = cost::Links{};
  options.facts.parameters = 1'000'000;
  const auto changes = run(2, 4, options, {1, 1, 1});
  ASSERT_FALSE(changes[0].empty());
  EXPECT_GT(changes[0].back().second.optimizer, 1);
  ASSERT_FALSE(said.empty());
  EXPECT_THAT(said[0], AllOf(HasSubstr("step 2: P=1 G=1 O=1 -> "), HasSubstr("(auto; memory: "),
                             HasSubstr(" % free in step 1, and 10 % are to stay free)")));
}

TEST(Dial, ARunThatIsResumedTakesTheEntryThatCountsThere) {
  DialOptions options;
  options.schedule = {{3, {2, 2, 2}}, {5, {4, 4, 4}}, {100, {1, 1, 1}}};
  EXPECT_THAT(run(4, 5, options, {1, 1, 1}, {}, 51)[0], ElementsAre(Change(51, {4, 4, 4})));
}

class DialRequests : public os::Scratch {
 protected:
  DialRequests() { options_.folder = folder_; }
  Client& ask(const Json& request) {
    clients_.push_back(std::make_unique<Client>(folder_, request));
    // The server's thread has it when it has answered.
    if (request["ask"] == "turn" || request["ask"] == "experts") {
      EXPECT_EQ(event(*clients_.back())["event"], "accepted");
    }
    return *clients_.back();
  }
  static Json event(Client& client) {
    return client.next(os::Deadline(std::chrono::seconds(20))).value_or(Json{{"event", "nothing came"}});
  }

  DialOptions options_;
  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(DialRequests, AreFollowedAtTheNextEdgeAndTimed) {
  const auto changes = run(2, 8, options_, {1, 1, 1}, [&](int64_t step) {
    if (step == 4) ask({{"ask", "turn"}, {"degree", 2}});
  });
  EXPECT_THAT(changes[0], ElementsAre(Change(4, {2, 2, 2})));
  const Json changed = event(*clients_[0]);
  EXPECT_EQ(changed["event"], "changed");
  EXPECT_EQ(changed["step"], 4);
  EXPECT_EQ(changed["from"], (Json{1, 1, 1}));
  EXPECT_EQ(changed["to"], (Json{2, 2, 2}));
  EXPECT_EQ(changed["seconds"], 0.25);
  EXPECT_EQ(changed["bytes"], 9'000'000) << "of all ranks";
  const Json timed = event(*clients_[0]);
  EXPECT_EQ(timed["event"], "timed");
  EXPECT_EQ(timed["step"], 6) << "the second step with the new degrees";
}

TEST_F(DialRequests, TheLastOfTwoCountsAndItIsStrongerThanTheSchedule) {
  options_.schedule = {{4, {4, 4, 4}}};
  const auto changes = run(4, 6, options_, {1, 1, 1}, [&](int64_t step) {
    if (step != 4) return;
    ask({{"ask", "turn"}, {"degree", 4}});
    ask({{"ask", "turn"}, {"degree", 2}});
  });
  EXPECT_THAT(changes[0], ElementsAre(Change(4, {2, 2, 2})));
  EXPECT_EQ(event(*clients_[0])["message"], "another request came after this one");
  EXPECT_EQ(event(*clients_[1])["event"], "changed");
}

TEST_F(DialRequests, ForTiersDoNotUndoWhatIsScheduledForThatEdge) {
  using offload::Tier;
  options_.schedule = {{3, {2, 2, 2}}};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    DialOptions own = options_;
    own.facts = cost::facts_of(fabric);
    Dial dial(not_owned(fabric), {.degrees = {1, 1, 1}}, own);
    for (int64_t step = 1; step <= 4; ++step) {
      if (fabric.rank() == 0 && step == 3) {
        ask({{"ask", "turn"}, {"offload", {{"optimizer", "disk"}}}});
        ask({{"ask", "auto"}});
        os::sleep_for(std::chrono::milliseconds(50));
      }
      const auto to = dial.at_step_edge(step, 0.1);
      EXPECT_EQ(to.has_value(), step == 3) << step;
      if (!to) continue;
      EXPECT_EQ(*to, (shard::Setting{{2, 2, 2}, {.optimizer = Tier::disk}}));
      dial.changed({.from = dial.setting(), .to = *to, .seconds = 0.25, .bytes = 0});
    }
  });
  EXPECT_THAT(event(*clients_[1])["message"].get<std::string>(), HasSubstr("bring the state back"))
      << "it is on its way to the disk";
}

TEST_F(DialRequests, ForWhatIsThereAlreadyChangeNothing) {
  const auto changes = run(2, 3, options_, {2, 2, 2}, [&](int64_t step) {
    if (step == 2) ask({{"ask", "turn"}, {"degree", 2}});
  });
  EXPECT_TRUE(changes[0].empty());
  EXPECT_EQ(event(*clients_[0])["event"], "unchanged");
}

TEST_F(DialRequests, ThatCanNotBeHadAreAnErrorOfWhoAskedAndTheRunGoesOn) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    DialOptions own = options_;
    own.facts = cost::facts_of(fabric);
    Dial dial(not_owned(fabric), {.degrees = {1, 1, 1}}, own);
    std::vector<int64_t> asked_at;
    for (int64_t step = 1; step <= 8; ++step) {
      if (fabric.rank() == 0 && (step == 3 || step == 6)) ask({{"ask", "turn"}, {"degree", 2}});
      const auto to = dial.at_step_edge(step, 0.1);
      if (!to) continue;
      asked_at.push_back(step);
      EXPECT_EQ(to->degrees, (Degrees{2, 2, 2}));
      if (step == 3) {
        dial.refused("there is no memory");
        EXPECT_EQ(dial.setting().degrees, (Degrees{1, 1, 1}));
        EXPECT_EQ(dial.figures().changes, 0);
      } else {
        dial.changed(done(fabric, dial.setting().degrees, to->degrees));
      }
    }
    EXPECT_THAT(asked_at, ElementsAre(3, 6)) << "what was refused is not asked for again";
    EXPECT_EQ(dial.setting().degrees, (Degrees{2, 2, 2}));
  });
  const Json error = event(*clients_[0]);
  EXPECT_EQ(error["event"], "error");
  EXPECT_THAT(error["message"].get<std::string>(),
              HasSubstr("step 3: P=1 G=1 O=1 stays, P=2 G=2 O=2 cannot be had: there is no memory"));
  EXPECT_EQ(event(*clients_[1])["event"], "changed");
}

TEST_F(DialRequests, ForTheStatusSayWhatOtherLayoutsWouldTake) {
  options_.facts.parameters = 1'000'000;
  Json status;
  run(4, 2, options_, {4, 4, 4}, [&](int64_t step) {
    if (step != 2) return;
    Client client(folder_, {{"ask", "show"}});
    status = event(client);
  });
  ASSERT_EQ(status["layouts"].size(), mesh::all_degrees(4).size());
  double replicas = 0, sharded = 0;
  for (const Json& layout : status["layouts"]) {
    if (layout["degrees"] == Json{4, 4, 4}) {
      EXPECT_EQ(layout["step_seconds"], status["step_seconds"]) << "what is in use takes what it takes";
      EXPECT_EQ(layout["memory_bytes"], status["memory_bytes"]);
      sharded = layout["memory_bytes"];
    }
    if (layout["degrees"] == Json{1, 1, 1}) replicas = layout["memory_bytes"];
    EXPECT_GE(layout["step_seconds"], 0.0);
  }
  EXPECT_GT(replicas, sharded + 4e6) << "the optimizer's state whole";
}

TEST_F(DialRequests, ForTiersLeaveTheDegrees) {
  using offload::Tier;
  const offload::Tiers on_disk{.optimizer = Tier::disk};
  comm::run_local(2, [&](comm::Fabric& fabric) {
    DialOptions own = options_;
    own.facts = cost::facts_of(fabric);
    Dial dial(not_owned(fabric), {.degrees = {1, 1, 1}}, own);
    for (int64_t step = 1; step <= 9; ++step) {
      if (fabric.rank() == 0) {
        if (step == 2) ask({{"ask", "turn"}, {"offload", {{"optimizer", "disk"}}}});
        if (step == 4) ask({{"ask", "turn"}, {"degree", 2}});
        if (step == 6) ask({{"ask", "auto"}});
        if (step == 6) os::sleep_for(std::chrono::milliseconds(50));
        if (step == 8) ask({{"ask", "turn"}, {"degree", 1}, {"offload", {{"optimizer", "device"}}}});
      }
      const auto to = dial.at_step_edge(step, 0.1);
      EXPECT_EQ(to.has_value(), step == 2 || step == 4 || step == 8) << step;
      if (!to) continue;
      const Degrees degrees = step == 4 ? Degrees{2, 2, 2} : Degrees{1, 1, 1};
      EXPECT_EQ(*to, (shard::Setting{degrees, step == 8 ? offload::Tiers() : on_disk}));
      dial.changed({.from = dial.setting(), .to = *to, .seconds = 0.25, .bytes = 0});
    }
  });
  const Json changed = event(*clients_[0]);
  EXPECT_EQ(changed["to"], (Json{1, 1, 1}));
  EXPECT_EQ(tiers_from(changed["offload_to"]), on_disk);
  EXPECT_EQ(tiers_from(changed["offload_from"]), offload::Tiers());
  EXPECT_THAT(event(*clients_[2])["message"].get<std::string>(), HasSubstr("bring the state back"));
}

TEST_F(DialRequests, ForExpertsAreToldToAllOrRefused) {
  std::vector<int> heard;
  comm::run_local(4, [&](comm::Fabric& fabric) {
    DialOptions own = options_;
    own.facts = cost::facts_of(fabric);
    own.facts.parameters = 1000;
    own.facts.experts = {.degree = 4, .parameters = 200'000'000'000, .unit = 100'000'000'000, .units = 2};
    own.experts = 4;
    own.cannot_share_out = [](int degree) { return degree == 3 ? "there are 8" : ""; };
    Dial dial(not_owned(fabric), {.degrees = {1, 1, 1}}, own);
    for (int64_t step = 1; step <= 9; ++step) {
      if (fabric.rank() == 0) {
        if (step == 2) ask({{"ask", "experts"}, {"degree", 3}});
        if (step == 3) ask({{"ask", "experts"}, {"degree", 1}});
        if (step == 4) ask({{"ask", "experts"}, {"degree", 4}});
        if (step == 5) ask({{"ask", "experts"}, {"degree", 8}});
      }
      EXPECT_FALSE(dial.at_step_edge(step, 0.1));
      const auto asked = dial.scaling();
      if (asked && fabric.rank() == 2) heard.push_back(asked->experts);
      if (asked) dial.refuse(*asked, "the folder is full");
    }
  });
  EXPECT_THAT(event(*clients_[0])["message"].get<std::string>(),
              HasSubstr("experts stay shared out over 4 ranks, not 3: there are 8"));
  EXPECT_THAT(event(*clients_[1])["message"].get<std::string>(), HasSubstr("more of a place where"));
  const Json as_it_was = event(*clients_[2]);
  EXPECT_EQ(as_it_was["event"], "shared_out");
  EXPECT_EQ(as_it_was["from"], as_it_was["to"]);
  EXPECT_THAT(heard, ElementsAre(8)) << "less on each rank";
  EXPECT_THAT(event(*clients_[3])["message"].get<std::string>(), HasSubstr("not 8: the folder is full"));
}

TEST_F(DialRequests, TakeTheDialFromTheTunerAndGiveItBack) {
  options_.automatic = true;
  options_.links = cost::Links{};
  std::vector<bool> automatic;
  run(2, 30, options_, {1, 1, 1}, [&](int64_t step) {
    const auto is_automatic = [&] {
      Client client(folder_, {{"ask", "show"}});
      return event(client)["automatic"].get<bool>();
    };
    if (step == 3) automatic.push_back(is_automatic());
    if (step == 3) ask({{"ask", "turn"}, {"degree", 2}});
    if (step == 5) automatic.push_back(is_automatic());
    if (step != 6) return;
    EXPECT_EQ(event(*clients_[0])["event"], "changed");
    ask({{"ask", "auto"}});  // answered at an edge: this one, or the next
    os::sleep_for(std::chrono::milliseconds(50));
  });
  EXPECT_THAT(automatic, ElementsAre(true, false));
  EXPECT_EQ(event(*clients_[1])["event"], "automatic");
  const std::string record = os::files().read(folder_ / "dial.jsonl");
  EXPECT_GE(std::ranges::count(record, '\n'), 1 + 2 + 1 + 20) << "two lives of a tuner: begin and each of their steps";
  const Replay replayed = replay(record);
  for (size_t i = 0; i < replayed.decided.size(); ++i) {
    EXPECT_EQ(replayed.decided[i].has_value(), replayed.recorded[i].decision.has_value());
  }
}

TEST_F(DialRequests, ForTheTunerAreRefusedWhereItKnowsNothingOfTheJob) {
  comm::run_local(2, [&](comm::Fabric& fabric) {
    Dial dial(not_owned(fabric), {.degrees = {1, 1, 1}}, options_);
    if (fabric.rank() == 0) {
      ask({{"ask", "auto"}});
      os::sleep_for(std::chrono::milliseconds(50));
    }
    for (int64_t step = 1; step <= 4; ++step) EXPECT_FALSE(dial.at_step_edge(step, 0.1));
    EXPECT_FALSE(dial.automatic());
  });
  const Json error = event(*clients_[0]);
  EXPECT_EQ(error["event"], "error");
  EXPECT_THAT(error["message"].get<std::string>(), HasSubstr("DialOptions::facts"));
}

TEST_F(DialRequests, AFolderThatIsMissingIsMade) {
  options_.folder = folder_ / "runs" / "new";
  run(2, 1, options_, {1, 1, 1}, [&](int64_t) {
    Client client(options_.folder, {{"ask", "show"}});
    EXPECT_EQ(event(client)["event"], "status");
  });
}

TEST(Dial, OptionsThatCannotBeFollowedAreRefusedAtOnce) {
  const auto error_of = [](const DialOptions& options) -> std::string {
    std::string text = "nothing was thrown";
    comm::run_local(1, [&](comm::Fabric& fabric) {
      try {
        Dial dial(not_owned(fabric), {}, options);
      } catch (const InvalidArgument& error) {
        text = error.what();
      }
    });
    return text;
  };
  DialOptions automatic, scheduled, descending, both;
  automatic.automatic = true;
  EXPECT_THAT(error_of(automatic), HasSubstr("DialOptions::facts"));
  scheduled.schedule = {{3, {3, 3, 3}}};
  EXPECT_THAT(error_of(scheduled), HasSubstr("P=3"));
  descending.schedule = {{3, {1, 1, 1}}, {1, {1, 1, 1}}};
  EXPECT_THAT(error_of(descending), HasSubstr("step 1 after step 3"));
  both.automatic = true;
  both.schedule = {{3, {1, 1, 1}}};
  EXPECT_THAT(error_of(both), HasSubstr("beside a schedule"));
}

TEST_F(DialRequests, AFolderOfALiveRunIsAnErrorOnAllRanks) {
  const Server live(folder_, 2);
  std::mutex mutex;
  int refused = 0;
  comm::run_local(2, [&](comm::Fabric& fabric) {
    DialOptions own = options_;
    own.facts = cost::facts_of(fabric);
    EXPECT_THROW(Dial(not_owned(fabric), {}, own), os::AddressInUse);
    const std::scoped_lock lock(mutex);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST_F(DialRequests, AFolderWithoutRoomForASocketIsNoReasonToStop) {
  os::files().write(folder_ / "file", "");
  options_.folder = folder_ / "file" / "run";
  options_.schedule = {{2, {2, 2, 2}}};
  EXPECT_THAT(run(2, 3, options_)[0], ElementsAre(Change(2, {2, 2, 2})));
}

}  // namespace

RANK_MAIN(measures_links) {
  os::keep_freed_memory();  // as `tesserae train` does
  const auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const uint64_t before = os::recent_memory().resident;
  const cost::Links links = cost::measure_links(*fabric);
  testing::report("kept", static_cast<double>(os::recent_memory().resident) - static_cast<double>(before));
  testing::report("inside", links.inside);
  testing::report("between", links.between);
  testing::report("latency", links.inside_latency);
  testing::report("memory", links.memory);
  testing::report("shares", cost::ranks_can_share(*fabric) ? 1 : 0);
  const cost::PlaceMemory place = cost::fullest_place(*fabric);
  testing::report("free", place.free / place.total);
}

TEST(Links, AreMeasuredAndTheSameOnAllRanks) {
  const auto results = testing::run_ranks("measures_links", 2);
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  for (const char* key : {"inside", "between", "latency", "memory", "shares", "free"}) {
    EXPECT_EQ(results[0].value(key), results[1].value(key)) << key;
  }
  EXPECT_GT(results[0].value("inside"), 1e7);
  EXPECT_LT(results[0].value("inside"), 1e12);
  EXPECT_GT(results[0].value("memory"), 1e8);
  EXPECT_LT(results[0].value("latency"), 1);
  EXPECT_EQ(results[0].value("shares"), 1) << "shm is the default on one host";
  EXPECT_GT(results[0].value("free"), 0);
  EXPECT_LE(results[0].value("free"), 1);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(results[0].value("kept"), 10 << 20) << "its buffers have 16 MiB";
#endif
}

}  // namespace tesserae::dial
