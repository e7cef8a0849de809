#include "tesserae/launch/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"
#include "tesserae/os/host.h"
#include "tesserae/os/port.h"
#include "tests/support/promise.h"
#include "tests/train/run_program.h"

namespace tesserae::launch {
namespace {

using std::chrono::seconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

constexpr int repeats = 5;
constexpr double promised_seconds = 5;  // docs/faults.md: from a rank's end to the job's

/// Starts ranks that run a shell script and knows their process ids.
class Launcher : public testing::Test {
 protected:
  Launcher() { os::files().make_directories(folder_); }
  ~Launcher() override { os::files().remove_all(folder_); }

  Program launch(int ranks, const std::string& script, int replacements = 0,
                 std::map<std::string, std::string> environment = {}) {
    begin_ = os::now();
    environment.insert({{"FOLDER", folder_}, {"REPLACEMENTS", std::to_string(replacements)}});
    return Program({LAUNCH_RANKS, std::to_string(ranks), "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; " + script},
                   environment);
  }

  double elapsed() const { return std::chrono::duration<double>(os::now() - begin_).count(); }

  /// The ranks have all started, so that a signal meets them at work.
  void wait_until_started(int ranks) const {
    const os::Deadline deadline{seconds(60)};
    while (os::files().list(folder_).size() < static_cast<size_t>(ranks) && !deadline.passed()) {
      os::sleep_for(std::chrono::milliseconds(5));
    }
    os::sleep_for(std::chrono::milliseconds(200));  // from the first line of the script to its traps
  }

  /// Every rank has ended. A killed parent's children take a moment.
  void expect_nothing_left(int ranks) const {
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t id = std::stoi(os::files().read(folder_ + "/" + std::to_string(rank) + ".pid"));
      const os::Deadline deadline{seconds(20)};
      while (os::start_time(id) && !deadline.passed()) os::sleep_for(std::chrono::milliseconds(5));
      EXPECT_FALSE(os::start_time(id)) << "rank " << rank << ", process " << id;
    }
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-launcher-" + std::to_string(::getpid());
  os::TimePoint begin_;
};

TEST_F(Launcher, GivesEachRankTorchrunsVariables) {
  for (const bool programs : {false, true}) {
    std::map<std::string, std::string> environment;
    if (programs) environment["PROGRAMS"] = "1";
    Program job({LAUNCH_RANKS, "3", "sh", "-c",
                 "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $FROM_JOB "
                 "${OMP_NUM_THREADS:+threads} ${MASTER_PORT:+port}"},
                environment);
    EXPECT_TRUE(job.finish()->success());
    EXPECT_EQ(job.output, "0/3 0/3 127.0.0.1 yes threads port\n") << "standard output is rank 0's";
    EXPECT_THAT(job.errors, HasSubstr("rank 1: 1/3 1/3 127.0.0.1 yes threads port\n"));
    EXPECT_THAT(job.errors, HasSubstr("rank 2: 2/3 2/3 127.0.0.1 yes threads port\n"));
  }
}

TEST_F(Launcher, RanksThatAreCopiesShareTheProcessors) {
  Program job({"env", "-u", "OMP_NUM_THREADS", LAUNCH_RANKS, std::to_string(os::processors()), "threads"});
  EXPECT_TRUE(job.finish()->success());
  EXPECT_EQ(job.output, "1\n") << "OpenMP was loaded before anybody knew";
}

TEST_F(Launcher, OneOfSeveralHostsCountsItsRanksOn) {
  Program job(
      {LAUNCH_RANKS, "2", "sh", "-c",
       "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT; "
       "[ $RANK != 4 ] || touch $FOLDER/said; [ $RANK != 5 ] || until [ -e $FOLDER/said ]; do sleep 0.01; done; "
       "[ $RANK != 5 ] || exit 7; exec sleep 600"},
      {{"FOLDER", folder_}, {"HOSTS", "3"}, {"HOST", "2"}, {"PORT", "4711"}});
  EXPECT_EQ(job.finish()->code, 7);
  EXPECT_EQ(job.output, "4/6 0/2 first-host:4711\n");
  EXPECT_THAT(job.errors, HasSubstr("rank 5: 5/6 1/2 first-host:4711\n"));
  EXPECT_THAT(job.errors, HasSubstr("tesserae: rank 5 of 6 exited with code 7; the other ranks were ended"));
}

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
  Program second = of_host(1, "exec sleep 600", 1000);
  Program first = of_host(0, "until [ -e $FOLDER/done ]; do sleep 0.05; done", 1000);
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

TEST_F(Launcher, TheOnlyRankIsReplacedAsWell) {
  Program job = launch(1, "[ ! -e $FOLDER/again ] || exit 0; touch $FOLDER/again; exit 7", /*replacements=*/1);
  EXPECT_TRUE(job.finish()->success()) << job.errors;
  EXPECT_THAT(job.errors, HasSubstr("rank 0 of 1 exited with code 7; a new process takes its place (1 of 1)"));
  Program lost = launch(1, "exit 7", /*replacements=*/1);
  EXPECT_EQ(lost.finish()->code, 7) << lost.errors;
}

TEST_F(Launcher, AHostOfAJobOfSeveralMustKnowItsPlace) {
  for (const auto& [hosts, host] : {std::pair("2", "2"), std::pair("2", "-1"), std::pair("0", "0")}) {
    Program job({LAUNCH_RANKS, "1", "true"}, {{"HOSTS", hosts}, {"HOST", host}, {"PORT", "4711"}});
    EXPECT_NE(job.finish()->signal, 0);
    EXPECT_THAT(job.errors, HasSubstr("give its number and where they meet"));
  }
}

TEST_F(Launcher, WhatIsKilledBecauseItDoesNotEndIsNotReplaced) {
  Program job = launch(2, "trap '' TERM; exec sleep 600", /*replacements=*/4, {{"STOP_GRACE", "300"}});
  wait_until_started(2);
  job.process().signal(SIGTERM);
  EXPECT_EQ(job.finish()->code, 128 + SIGTERM) << job.errors;
  EXPECT_THAT(job.errors, Not(HasSubstr("takes its place")));
  expect_nothing_left(2);
}

TEST_F(Launcher, WhatEndsWhenItIsAskedToIsNotReplaced) {
  Program job = launch(2, "exec sleep 600", /*replacements=*/4);
  wait_until_started(2);
  job.process().signal(SIGTERM);
  EXPECT_EQ(job.finish()->code, 128 + SIGTERM);
  EXPECT_THAT(job.errors, Not(HasSubstr("takes its place")));
  expect_nothing_left(2);
}

TEST_F(Launcher, ARankThatFailsTakesTheJobDownWithItsErrorLast) {
  std::vector<double> took;
  for (int i = 0; i < repeats; ++i) {
    Program job = launch(4, "if [ $RANK = 2 ]; then sleep 0.3; echo 'the cause' >&2; exit 7; fi; exec sleep 600");
    const auto exit = job.finish();
    took.push_back(elapsed());
    ASSERT_TRUE(exit.has_value());
    EXPECT_EQ(exit->code, 7);
    EXPECT_EQ(job.errors, "rank 2: the cause\ntesserae: rank 2 of 4 exited with code 7; the other ranks were ended\n");
    expect_nothing_left(4);
  }
  expect_promise(took, promised_seconds);
}

TEST_F(Launcher, ARankThatIsKilledIsNamedWithItsSignal) {
  Program job = launch(2, "if [ $RANK = 1 ]; then sleep 0.3; kill -9 $$; fi; exec sleep 600");
  EXPECT_EQ(job.finish()->code, 128 + SIGKILL);
  EXPECT_EQ(job.errors, "tesserae: rank 1 of 2 was killed by signal 9 (Killed); the other ranks were ended\n");
  expect_nothing_left(2);
}

TEST_F(Launcher, RanksThatIgnoreTheRequestAreKilled) {
  std::vector<double> took;
  for (int i = 0; i < repeats; ++i) {
    Program job =
        launch(2, "if [ $RANK = 1 ]; then sleep 0.5; exit 1; fi; trap '' TERM; while true; do sleep 0.1; done");
    EXPECT_EQ(job.finish()->code, 1);
    took.push_back(elapsed());
    expect_nothing_left(2);
  }
  expect_promise(took, promised_seconds);
}

TEST_F(Launcher, ARankThatLostAPeerIsNotToBlame) {
  Program job = launch(3,
                       "case $RANK in 0) sleep 0.5; echo 'the cause' >&2; exit 1;; "
                       "1) sleep 0.2; echo 'lost rank 0' >&2; exit 3;; 2) exec sleep 600;; esac");
  EXPECT_EQ(job.finish()->code, 1);
  EXPECT_THAT(job.errors, EndsWith("tesserae: rank 0 of 3 exited with code 1; the other ranks were ended\n"
                                   "the last that it wrote:\n  the cause\n"));
}

TEST_F(Launcher, ALostPeerIsToBlameIfNobodyElseIs) {
  Program job = launch(2, "if [ $RANK = 1 ]; then sleep 0.2; echo 'lost' >&2; exit 3; fi; exec sleep 600");
  EXPECT_EQ(job.finish()->code, exit_peer_lost);
  EXPECT_THAT(job.errors, HasSubstr("rank 1 of 2 exited with code 3"));
  expect_nothing_left(2);
}

TEST_F(Launcher, WhatOthersSayAfterAFailureDoesNotBuryIt) {
  Program job = launch(2,
                       "if [ $RANK = 1 ]; then sleep 0.3; echo 'the cause' >&2; exit 1; fi; "
                       "trap 'echo consequence >&2; exit 3' TERM; while true; do sleep 0.05; done");
  EXPECT_EQ(job.finish()->code, 1);
  EXPECT_THAT(job.errors, Not(HasSubstr("consequence")));
}

TEST_F(Launcher, CtrlCAsksTheRanksToEnd) {
  Program job = launch(3, "trap 'echo summary >&2; exit 143' TERM; while true; do sleep 0.05; done");
  wait_until_started(3);
  job.process().signal(SIGINT);
  EXPECT_EQ(job.finish()->code, 128 + SIGINT);
  EXPECT_THAT(job.errors, HasSubstr("rank 2: summary\n"));
  expect_nothing_left(3);
}

TEST_F(Launcher, RanksThatFinishAfterCtrlCMakeASuccess) {
  Program job = launch(2, "trap 'exit 0' TERM; while true; do sleep 0.05; done");
  wait_until_started(2);
  job.process().signal(SIGTERM);
  EXPECT_TRUE(job.finish()->success());
}

TEST_F(Launcher, ASecondCtrlCEndsStubbornRanksAtOnce) {
  Program job = launch(2, "trap '' TERM; while true; do sleep 0.05; done");
  wait_until_started(2);
  job.process().signal(SIGINT);
  ASSERT_TRUE(job.wait_for("stopping"));
  begin_ = os::now();
  job.process().signal(SIGINT);
  EXPECT_EQ(job.finish()->code, 128 + SIGINT);
  EXPECT_LT(elapsed(), 15) << "without waiting for the 20 s of grace";
  expect_nothing_left(2);
}

TEST_F(Launcher, RanksDieWithALauncherThatIsKilled) {
  Program job = launch(3, "exec sleep 600");
  wait_until_started(3);
  job.process().signal(SIGKILL);
  EXPECT_EQ(job.finish()->signal, SIGKILL);
  expect_nothing_left(3);
}

TEST_F(Launcher, ReplacesARankThatIsLostAndTellsItTheEpoch) {
  Program job = launch(2,
                       "if [ $RANK = 1 ] && [ $TESSERAE_EPOCH -lt 2 ]; then sleep 0.2; kill -9 $$; fi; "
                       "if [ $RANK = 1 ]; then echo epoch $TESSERAE_EPOCH >&2; else sleep 3; fi",
                       2);
  EXPECT_TRUE(job.finish()->success()) << job.errors;
  EXPECT_THAT(job.errors, HasSubstr("killed by signal 9 (Killed); a new process takes its place (2 of 2)\n"));
  EXPECT_THAT(job.errors, HasSubstr("rank 1: epoch 2\n"));
  expect_nothing_left(2);
}

// To start at once would take processors from ranks that go on.
TEST_F(Launcher, TheSpareAfterTheOneThatTookAPlaceIsStartedLater) {
  Program job = launch(2,
                       "if [ $TESSERAE_SPARE ]; then date +%s%N >> $FOLDER/spares; "
                       "elif [ $RANK = 1 ]; then sleep 1; date +%s%N > $FOLDER/lost; kill -9 $$; fi; "
                       "until [ $(wc -l < $FOLDER/spares) = 2 ]; do sleep 0.1; done",
                       2, {{"SPARES", "1"}, {"SPARE_PAUSE", "1500"}});
  EXPECT_TRUE(job.finish()->success()) << job.errors;
  EXPECT_THAT(job.errors, HasSubstr("a new process takes its place (1 of 2)\n"));
  std::istringstream spares(os::files().read(folder_ + "/spares"));
  const int64_t lost = std::stoll(os::files().read(folder_ + "/lost"));
  int64_t first = 0, second = 0, third = 0;
  spares >> first >> second;
  EXPECT_LT(first, lost) << "one waits from the start on";
  EXPECT_GE(second - lost, 1'500'000'000);
  EXPECT_FALSE(spares >> third);
}

TEST_F(Launcher, DoesNotReplaceARankWhoseConfigurationCannotWork) {
  Program job = launch(2, "if [ $RANK = 1 ]; then sleep 0.2; echo 'no such key' >&2; exit 2; fi; exec sleep 600", 5);
  EXPECT_EQ(job.finish()->code, 2);
  EXPECT_THAT(job.errors, HasSubstr("rank 1 of 2 exited with code 2; the other ranks were ended"));
  expect_nothing_left(2);
}

TEST_F(Launcher, ARankThatIsLostInTheLastMomentsDoesNotUndoTheJob) {
  Program job = launch(3,
                       "case $RANK/$TESSERAE_EPOCH in 2/0) sleep 0.3; kill -9 $$;; 2/1) sleep 1; exit 3;; "
                       "1/0) sleep 1;; 0/0) sleep 3; echo summary;; esac",
                       5);
  EXPECT_TRUE(job.finish()->success()) << job.errors;
  EXPECT_THAT(job.output, HasSubstr("summary"));
}

TEST_F(Launcher, DoesNotReplaceRanksThatFailOfTheSame) {
  Program job = launch(3, "sleep 0.$((RANK + 1)); echo 'no room' >&2; exit 1", 5);
  EXPECT_EQ(job.finish()->code, 1);
  EXPECT_THAT(job.errors, HasSubstr("exited with code 1; the other ranks were ended"));
  EXPECT_THAT(job.errors, Not(HasSubstr("a new process")));
  expect_nothing_left(3);
}

TEST_F(Launcher, DoesNotReplaceOnceOthersAreDone) {
  Program job = launch(2, "if [ $RANK = 1 ]; then sleep 0.5; exit 1; fi", 5);
  EXPECT_EQ(job.finish()->code, 1);
  EXPECT_THAT(job.errors, HasSubstr("rank 1 of 2 exited with code 1; the other ranks were ended"));
}

TEST_F(Launcher, AProgramThatIsNotThereIsAnError) {
  EXPECT_THROW(run_local_job({.ranks = 2, .command = {"/nowhere/program"}, .environment = {}}), IoError);
  EXPECT_THROW(run_local_job({.ranks = 0, .command = {"true"}, .environment = {}}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::launch
