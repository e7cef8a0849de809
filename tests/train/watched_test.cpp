#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/os/clock.h"
#include "tests/train/train_job.h"

// What `tesserae train` measures of its ranks, and what a person asks of a run: `tesserae trace`, `tesserae stacks`.

namespace tesserae::train {
namespace {

using config::Json;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

class WatchedRun : public testing::Test {
 protected:
  static std::vector<std::string> arguments(int ranks, const std::vector<std::string>& more = {}) {
    std::vector<std::string> all = {"--nproc", std::to_string(ranks), "--set", "monitor.every_seconds=0.05"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  Json file(const std::string& name) const { return Json::parse(os::files().read(job_.path("run/monitor/" + name))); }
  std::vector<Json> events() const {
    std::vector<Json> all;
    std::istringstream lines(os::files().read(job_.path("run/monitor/events.jsonl")));
    for (std::string line; std::getline(lines, line);) all.push_back(Json::parse(line));
    return all;
  }
  Program ask(const std::vector<std::string>& words) const {
    std::vector<std::string> all = {TESSERAE_PROGRAM};
    all.insert(all.end(), words.begin(), words.end());
    return Program(all, {});
  }

  const TrainJob job_{"watched"};
};

TEST_F(WatchedRun, IsMeasuredWithoutAnyNumberChanging) {
  const std::vector<std::string> options = {"hybrid_shard_degree=2", "checkpoint.every_steps=24"};
  job_.run("run", arguments(4, options));
  job_.run("reference", arguments(4, {"hybrid_shard_degree=2", "checkpoint.every_steps=24", "monitor.enabled=false"}));
  job_.expect_same_history("run", "reference", 24);
  job_.expect_same_state("run", "reference", 24);
  EXPECT_FALSE(os::files().exists(job_.path("reference/monitor")));
  const Json now = file("now.json");
  EXPECT_EQ(now["state"], "ended");
  EXPECT_EQ(now["how"], "done");
  EXPECT_EQ(now["job"]["source"], "tesserae train");
  EXPECT_EQ(now["job"]["steps"], 24);
  EXPECT_EQ(now["job"]["degrees"], Json({2, 2, 2}));
  const std::vector<Json> all = events();
  EXPECT_TRUE(std::ranges::any_of(all, [](const Json& event) { return event["text"] == "step 24 is saved"; }));
}

TEST_F(WatchedRun, ARankThatIsStoppedForAMomentIsNamed) {
  Program program = job_.start("run", arguments(3, {"train.steps=400"}));
  ASSERT_TRUE(program.wait_for("step 60/")) << program.output << program.errors;
  const pid_t victim = children_of(program.process().id()).at(2);
  ::kill(victim, SIGSTOP);
  os::sleep_for(std::chrono::milliseconds(1500));
  ::kill(victim, SIGCONT);
  const auto exit = program.finish(std::chrono::seconds(200));
  ASSERT_TRUE(exit && exit->success()) << program.errors;
  std::string told;
  for (const Json& event : events()) told += event.dump() + "\n";
  EXPECT_THAT(told + file("now.json").dump(),
              ::testing::ContainsRegex("\"rank\":[0-9]+,\"text\":\"rank [0-9]+ takes 1\\.[0-9]+ s longer"));
}

TEST_F(WatchedRun, IsTracedWhileItRuns) {
  Program program = job_.start("run", arguments(2, {"train.steps=100000", "run.log_every=20"}));
  ASSERT_TRUE(program.wait_for("step 20/")) << program.output << program.errors;
  Program asking = ask({"trace", job_.path("run"), "--steps", "4"});
  const auto answered = asking.finish(std::chrono::seconds(100));
  ASSERT_TRUE(answered && answered->success()) << asking.output << asking.errors;
  EXPECT_THAT(asking.output, HasSubstr("steps "));
  const std::string name = asking.output.substr(asking.output.find('/'));
  const Json trace = Json::parse(os::files().read(name.substr(0, name.find('\n'))));
  std::set<std::string> names, lanes;
  std::set<int> ranks;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") lanes.insert(event["args"]["name"].get<std::string>());
    if (event["ph"] != "X") continue;
    names.insert(event["name"].get<std::string>());
    ranks.insert(event["pid"].get<int>());
    EXPECT_GE(event["dur"], 0);
  }
  EXPECT_EQ(ranks, (std::set<int>{0, 1}));
  EXPECT_THAT(lanes, IsSupersetOf({"rank 0", "rank 1", "training thread", "gather lane", "reduce lane"}));
  EXPECT_THAT(names, IsSupersetOf({"forward blocks.0", "backward blocks.1", "optimizer"}));
  program.process().signal(SIGTERM);
  program.finish(std::chrono::seconds(100));
}

TEST_F(WatchedRun, TellsWhereItsRanksAreAndWhichAreSilent) {
  Program program = job_.start("run", arguments(2, {"train.steps=100000", "run.log_every=20"}));
  ASSERT_TRUE(program.wait_for("step 20/")) << program.output << program.errors;
  {
    Program asking = ask({"stacks", job_.path("run")});
    const auto answered = asking.finish(std::chrono::seconds(100));
    ASSERT_TRUE(answered && answered->success()) << asking.output << asking.errors;
    for (const int rank : {0, 1}) {
      const std::string file = job_.path(cat("run/monitor/stacks-", rank, ".txt"));
      EXPECT_THAT(asking.output, HasSubstr(file));
      EXPECT_THAT(os::files().read(file), HasSubstr("tesserae::comm::Liveness::run")) << rank;
    }
  }
  const pid_t victim = children_of(program.process().id()).at(1);
  ::kill(victim, SIGSTOP);
  Program asking = ask({"stacks", job_.path("run"), "--wait", "60"});
  const auto answered = asking.finish(std::chrono::seconds(100));
  ::kill(victim, SIGCONT);
  ASSERT_TRUE(answered.has_value());
  EXPECT_EQ(answered->code, 1);
  EXPECT_THAT(asking.errors, HasSubstr("no answer from rank "));
  program.process().signal(SIGTERM);
  program.finish(std::chrono::seconds(100));
}

TEST_F(WatchedRun, WhatCannotBeAskedIsRefusedInWords) {
  job_.run("run", arguments(1));
  for (const char* verb : {"stacks", "trace"}) {
    Program ended = ask({verb, job_.path("run")});
    EXPECT_EQ(ended.finish(std::chrono::seconds(100))->code, 1);
    EXPECT_THAT(ended.errors, HasSubstr("no run listens in"));
    Program nowhere = ask({verb, job_.path("nowhere")});
    EXPECT_EQ(nowhere.finish(std::chrono::seconds(100))->code, 1);
    EXPECT_THAT(nowhere.errors, HasSubstr("there is no run folder"));
  }
  Program many = ask({"trace", job_.path("run"), "--steps", "1000"});
  EXPECT_EQ(many.finish(std::chrono::seconds(100))->code, 2);
}

}  // namespace
}  // namespace tesserae::train
