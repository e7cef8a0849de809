#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/os/port.h"
#include "tests/launch/launcher_job.h"

// Jobs of several hosts, whose launchers all run on this one.

namespace tesserae::launch {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

/// The launchers of two hosts with a rank each, which may go on with one.
class LaunchersOfTwoHosts : public Launcher {
 protected:
  Program of_host(int host, const std::string& script, int patience = 60'000, int replacements = 0) const {
    return Program({LAUNCH_RANKS, "1", "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; " + script},
                   variables(host, patience, replacements));
  }

  std::map<std::string, std::string> variables(int host, int patience = 60'000, int replacements = 0) const {
    return {{"FOLDER", folder_},
            {"HOSTS", "2"},
            {"HOST", std::to_string(host)},
            {"ADDRESS", "127.0.0.1"},
            {"PORT", port_},
            {"MIN_RANKS", "1"},
            {"EARLY_EXIT_CODE", "75"},
            {"REPLACEMENTS", std::to_string(replacements)},
            {"PATIENCE", std::to_string(patience)}};
  }

  const std::string port_ = std::to_string(os::free_port());
};

TEST_F(LaunchersOfTwoHosts, ARankThatIsLostOnOneDoesNotEndTheJob) {
  Program second = of_host(1, "sleep 0.3; kill -9 $$");
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done");
  EXPECT_TRUE(first.wait_for("rank 1 of 2 was killed by signal 9 (Killed); none takes its place, the job goes on"));
  os::files().write(folder_ + "/done", "");
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  EXPECT_TRUE(second.finish()->success()) << "the job has ended well: " << second.errors;
}

TEST_F(LaunchersOfTwoHosts, ARankThatIsLostIsReplacedOnItsHost) {
  Program second =
      of_host(1,
              "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE of epoch $TESSERAE_EPOCH >&2; "
              "if [ $TESSERAE_EPOCH = 2 ]; then until [ -e $FOLDER/done ]; do sleep 0.05; done; exit 0; fi; "
              "sleep 0.3; kill -9 $$",
              60'000, /*replacements=*/2);
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done", 60'000, 2);
  const std::string killed = "rank 1 of 2 was killed by signal 9 (Killed); a new process takes its place ";
  EXPECT_TRUE(first.wait_for(killed + "(1 of 2)"));
  EXPECT_TRUE(first.wait_for(killed + "(2 of 2)")) << "that one was lost, too: " << first.errors;
  EXPECT_TRUE(second.wait_for("rank 1: 1/2 0/1 of epoch 2"));
  os::files().write(folder_ + "/done", "");
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  EXPECT_TRUE(second.finish()->success()) << second.errors;
  EXPECT_THAT(second.errors, HasSubstr("rank 1: 1/2 0/1 of epoch 1"));
  expect_nothing_left(2);
}

TEST_F(LaunchersOfTwoHosts, ARankWithoutAPlaceThatHangsDoesNotOutliveTheJob) {
  Program second({LAUNCH_RANKS, "1", "shrink"}, variables(1));
  Program first({LAUNCH_RANKS, "1", "shrink"}, variables(0));
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  const auto end = second.finish();
  ASSERT_TRUE(end.has_value()) << "its launcher waits for that rank";
  EXPECT_TRUE(end->success()) << second.errors;
}

TEST_F(LaunchersOfTwoHosts, NobodyReplacesTheRanksOfALostHost) {
  Program second = of_host(1, "exec sleep 600", 1000, 5);
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done", 1000, 5);
  wait_until_started(2);
  second.process().signal(SIGSTOP);
  EXPECT_TRUE(first.wait_for("rank 1 of 2 is lost with host 1, of which nothing is heard; none takes its place"));
  second.process().signal(SIGCONT);
  os::files().write(folder_ + "/done", "");
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  EXPECT_EQ(second.finish()->code, exit_peer_lost);
}

TEST_F(LaunchersOfTwoHosts, TheOthersGoOnWithoutOneThatIsAskedToEnd) {
  Program second = of_host(1, "exec sleep 600", 60'000, 5);
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done", 60'000, 5);
  wait_until_started(2);
  second.process().signal(SIGTERM);
  EXPECT_EQ(second.finish()->code, 128 + SIGTERM) << second.errors;
  EXPECT_TRUE(first.wait_for("none takes its place, the job goes on")) << first.errors;
  EXPECT_THAT(first.errors, Not(HasSubstr("(2 of 5)"))) << "nothing starts where all is to end";
  os::files().write(folder_ + "/done", "");
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  expect_nothing_left(2);
}

TEST_F(LaunchersOfTwoHosts, RanksThatEndWellWhenTheyAreAskedToGiveTheirHostTheStatusOfTheJob) {
  const std::string script = "trap 'exit 0' TERM; until [ -e $FOLDER/done ]; do sleep 0.05; done";
  Program second = of_host(1, script), first = of_host(0, script);
  wait_until_started(2);
  second.process().signal(SIGTERM);
  EXPECT_TRUE(second.wait_for("stopping after this step"));
  os::sleep_for(std::chrono::milliseconds(500));
  os::files().write(folder_ + "/done", "");
  EXPECT_EQ(first.finish()->code, 0) << first.errors;
  EXPECT_EQ(second.finish()->code, 0) << second.errors;
}

TEST_F(LaunchersOfTwoHosts, OneOfWhichNothingIsHeardHasNoPartAnyMore) {
  Program second = of_host(1, "exec sleep 600", 3000);
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done", 3000);
  wait_until_started(2);
  second.process().signal(SIGSTOP);
  EXPECT_TRUE(first.wait_for("rank 1 of 2 is lost with host 1, of which nothing is heard; none takes its place"));
  second.process().signal(SIGCONT);
  EXPECT_EQ(second.finish()->code, exit_peer_lost);
  EXPECT_THAT(second.errors, HasSubstr("the ranks of this host are killed"));
  os::files().write(folder_ + "/done", "");
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  expect_nothing_left(2);
}

TEST_F(LaunchersOfTwoHosts, AFailureThatNobodySurvivesEndsBoth) {
  Program second = of_host(1, "sleep 0.3; echo 'no such key' >&2; exit 2");
  Program first = of_host(0, "exec sleep 600");
  EXPECT_EQ(first.finish()->code, 2);
  EXPECT_EQ(second.finish()->code, 2);
  EXPECT_THAT(second.errors, HasSubstr("rank 1: no such key"));
  EXPECT_THAT(first.errors, HasSubstr("rank 1 of 2 exited with code 2"));
}

TEST_F(LaunchersOfTwoHosts, WhatWasLostLongAgoDoesNotCountWhenAllAreAskedToEnd) {
  const std::string script = "trap 'exit 75' TERM; until [ -e $FOLDER/never ]; do sleep 0.05; done";
  Program second(
      {LAUNCH_RANKS, "2", "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; [ $RANK != 3 ] || kill -9 $$; " + script},
      variables(1));
  Program first({LAUNCH_RANKS, "2", "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; " + script}, variables(0));
  EXPECT_TRUE(first.wait_for("rank 3 of 4 was killed by signal 9 (Killed); none takes its place"));
  wait_until_started(4);
  second.process().signal(SIGTERM);
  first.process().signal(SIGTERM);
  EXPECT_EQ(first.finish()->code, 75) << first.errors;
  EXPECT_EQ(second.finish()->code, 75) << "that of the job: " << second.errors;
}

/// They see one folder, so none of them is one without which the job cannot go on.
class LaunchersThatSucceed : public LaunchersOfTwoHosts {
 protected:
  LaunchersThatSucceed() { os::files().make_directory(shared_); }
  ~LaunchersThatSucceed() override { EXPECT_THAT(os::files().list(shared_), testing::IsEmpty()) << "claims are left"; }

  Program of(int host, std::map<std::string, std::string> more = {}, const std::string& script = until_done) const {
    std::map<std::string, std::string> all = variables(host);
    all["SHARED"] = shared_;
    all["TESSERAE_LOG"] = "info";
    for (const auto& [name, value] : more) all[name] = value;
    return Program({LAUNCH_RANKS, "1", "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; " + script}, all);
  }

  /// All know of each other.
  void wait_until_begun(int ranks, const std::vector<Program*>& others) {
    wait_until_started(ranks + 1);  // and the folder that they share
    for (Program* other : others) {
      EXPECT_TRUE(other->wait_for("this host may take over")) << other->errors;
    }
  }

  /// Until claims of so many generations were made.
  void wait_for_claims(size_t number) const {
    const auto made = [this] {
      const std::vector<std::string> names = os::files().list(shared_);
      return std::ranges::count_if(names,
                                   [](const std::string& name) { return name.find("draft") == std::string::npos; });
    };
    for (const os::Deadline deadline(seconds(60)); std::cmp_less(made(), number) && !deadline.passed();) {
      os::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(std::cmp_greater_equal(made(), number));
  }

  void end() { os::files().write(folder_ + "/done", ""); }

  static constexpr const char* until_done = "until [ -e $FOLDER/done ]; do sleep 0.05; done";
  const std::string shared_ = folder_ + "/shared";
};

TEST_F(LaunchersThatSucceed, WhenTheFirstHostIsLostAnotherOneTakesOver) {
  Program second = of(1), first = of(0);
  wait_until_begun(2, {&second});
  first.process().signal(SIGKILL);
  EXPECT_TRUE(second.wait_for("host 1 decides from now on, and 1 rank is left")) << second.errors;
  end();
  EXPECT_TRUE(second.finish()->success()) << second.errors;
  expect_nothing_left(2);
}

TEST_F(LaunchersThatSucceed, AFirstHostThatComesBackDecidesNoMore) {
  Program second = of(1, {{"PATIENCE", "3000"}}), first = of(0, {{"PATIENCE", "3000"}});
  wait_until_begun(2, {&second});
  first.process().signal(SIGSTOP);
  EXPECT_TRUE(second.wait_for("host 1 decides from now on, and 1 rank is left")) << second.errors;
  first.process().signal(SIGCONT);
  EXPECT_EQ(first.finish()->code, exit_peer_lost) << first.errors;
  EXPECT_THAT(first.errors, HasSubstr("host 1 decides on the job now"));
  end();
  EXPECT_TRUE(second.finish()->success()) << second.errors;
  expect_nothing_left(2);
}

TEST_F(LaunchersThatSucceed, TheOthersFollowTheOneThatHasTakenOver) {
  const std::map<std::string, std::string> three = {{"HOSTS", "3"}, {"REPLACEMENTS", "1"}};
  const std::string script = cat("[ $TESSERAE_EPOCH = 0 ] || echo the new one is there >&2; ", until_done);
  Program first = of(0, three, script), second = of(1, three, script), third = of(2, three, script);
  wait_until_begun(3, {&second, &third});
  first.process().signal(SIGKILL);
  Program* decides = nullptr;
  for (const os::Deadline deadline(seconds(60)); decides == nullptr && !deadline.passed();) {
    for (Program* each : {&second, &third}) {
      if (each->wait_for("2 ranks are left", seconds(1))) decides = each;
    }
  }
  ASSERT_NE(decides, nullptr) << second.errors << third.errors;
  Program& other = decides == &second ? third : second;
  EXPECT_TRUE(other.wait_for("decides from now on")) << other.errors;
  const pid_t lost = std::stoi(os::files().read(folder_ + (decides == &second ? "/2.pid" : "/1.pid")));
  ::kill(lost, SIGKILL);
  EXPECT_TRUE(decides->wait_for("a new process takes its place (1 of 1)")) << decides->errors << other.errors;
  EXPECT_TRUE(other.wait_for("the new one is there")) << other.errors;
  decides->process().signal(SIGKILL);
  EXPECT_TRUE(other.wait_for("and 1 rank is left")) << other.errors;
  end();
  EXPECT_TRUE(other.finish()->success()) << other.errors;
}

TEST_F(LaunchersThatSucceed, TooFewRanksAreLeftOfTheJob) {
  Program second = of(1, {{"MIN_RANKS", "2"}}), first = of(0, {{"MIN_RANKS", "2"}});
  wait_until_begun(2, {&second});
  first.process().signal(SIGKILL);
  EXPECT_TRUE(second.wait_for("and 1 rank is left")) << second.errors;
  end();
  EXPECT_EQ(second.finish()->code, exit_peer_lost);
  EXPECT_THAT(second.errors, HasSubstr("fewer than the 2 that the job needs"));
}

TEST_F(LaunchersThatSucceed, AHostWithoutRanksTakesOverNothing) {
  Program second = of(1, {}, "kill -9 $$"), first = of(0);
  EXPECT_TRUE(first.wait_for("rank 1 of 2 was killed by signal 9 (Killed); none takes its place")) << first.errors;
  EXPECT_TRUE(second.wait_for("this host may take over")) << second.errors;
  first.process().signal(SIGKILL);
  EXPECT_EQ(second.finish()->code, exit_peer_lost) << second.errors;
  EXPECT_THAT(second.errors, Not(HasSubstr("decides from now on")));
  EXPECT_THAT(os::files().list(shared_), testing::SizeIs(1)) << "the first one's claim";
  for (const std::string& claim : os::files().list(shared_)) os::files().remove(shared_ + "/" + claim);
}

/// Two of three are lost at once: the second one has claimed, and nobody has followed it yet.
TEST_F(LaunchersThatSucceed, OneThatTakesOverAndIsLostIsSucceededToo) {
  const std::map<std::string, std::string> three = {{"HOSTS", "3"}, {"PATIENCE", "2000"}};
  const std::map<std::string, std::string> patient = {{"HOSTS", "3"}};  // it waits for the third one meanwhile
  Program first = of(0, patient), second = of(1, patient), third = of(2, three);
  wait_until_begun(3, {&second, &third});
  third.process().signal(SIGSTOP);
  first.process().signal(SIGKILL);
  wait_for_claims(2);
  second.process().signal(SIGKILL);
  third.process().signal(SIGCONT);
  EXPECT_TRUE(third.wait_for("host 1 had taken over, and is lost, too; host 2 decides from now on, and 1 rank is left"))
      << third.errors;
  end();
  EXPECT_TRUE(third.finish()->success()) << third.errors;
}

TEST_F(LaunchersThatSucceed, AHostThatSeesAnotherFolderTakesOverNothing) {
  const std::string elsewhere = folder_ + "/elsewhere";
  os::files().make_directory(elsewhere);
  Program second = of(1, {{"SHARED", elsewhere}}), first = of(0);
  EXPECT_TRUE(second.wait_for("is not to be seen: this host takes over nothing")) << second.errors;
  end();
  EXPECT_TRUE(first.finish()->success()) << first.errors;
  EXPECT_TRUE(second.finish()->success()) << second.errors;
}

}  // namespace
}  // namespace tesserae::launch
