#include "tesserae/launch/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"
#include "tesserae/os/host.h"
#include "tests/launch/launcher_job.h"
#include "tests/support/promise.h"

namespace tesserae::launch {
namespace {

using std::chrono::seconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

constexpr int repeats = 5;
constexpr double promised_seconds = 5;  // docs/faults.md: from a rank's end to the job's

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

TEST_F(Launcher, KnowsHowRanksEndWhereItsOwnParentIgnoresThatOfChildren) {
  for (const char* const status : {"0", "7"}) {
    Program job({"sh", "-c", "trap '' CHLD; exec \"$0\" \"$@\"", LAUNCH_RANKS, "2", "sh", "-c", cat("exit ", status)});
    EXPECT_EQ(job.finish()->code, std::stoi(status)) << job.errors;
  }
}

TEST_F(Launcher, RanksThatAreCopiesShareTheProcessors) {
  Program job({"env", "-u", "OMP_NUM_THREADS", LAUNCH_RANKS, std::to_string(os::processors()), "threads"});
  EXPECT_TRUE(job.finish()->success());
  EXPECT_EQ(job.output, "1\n") << "OpenMP was loaded before anybody knew";
}

TEST_F(Launcher, WhatRanksAreCopiedFromMayFail) {
  const std::string says =
      "import os, socket; orders = socket.socket(fileno=int(os.environ['TESSERAE_FORK_SERVER'])); orders.send(b'";
  const std::string answers =
      says + "ready'); _, (output, answer), _, _ = socket.recv_fds(orders, 100000, 2); os.write(answer, b'";
  for (const auto& [server, why] :
       {std::pair<std::string, std::string>{"import sys; sys.exit(3)", "exited with code 3"},
        {says + "it is full')", "it is full"},
        {says + "ready')", "exited with code 0"},
        {says + "ready'); orders.recv(1)", "exited with code 0"},
        {answers + "it is full')", "it is full"},
        {answers + "-5')", "-5"},
        {answers + "')", "exited with code 0"},
        {answers + "999999999\\n')", "a rank was lost before it began"}}) {
    Program job({LAUNCH_RANKS, "2", "sh", "-c", "echo $RANK"},
                {{"FORK_SERVER", server}, {"PROGRAMS", "1"}, {"TESSERAE_LOG", "info"}});
    EXPECT_TRUE(job.finish()->success()) << job.errors;
    EXPECT_EQ(job.output, "0\n");
    EXPECT_THAT(job.errors, HasSubstr("rank 1: 1\n"));
    EXPECT_THAT(job.errors, HasSubstr("tesserae: each rank loads what it needs, as by --cold: " + why + "\n"));
  }
}

TEST_F(Launcher, OneOfSeveralHostsCountsItsRanksOn) {
  Program job(
      {LAUNCH_RANKS, "2", "sh", "-c",
       "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT; "
       "[ $RANK != 4 ] || touch $FOLDER/said; [ $RANK != 5 ] || until [ -e $FOLDER/said ]; do sleep 0.01; done; "
       "[ $RANK != 5 ] || exit 7; exec sleep 600"},
      {{"FOLDER", folder_}, {"HOSTS", "3"}, {"HOST", "2"}, {"PORT", "4711"}});
  EXPECT_EQ(job.finish()->code, 7);
  EXPECT_EQ(job.output, "4/6 0/2 2/3 first-host:4711\n");
  EXPECT_THAT(job.errors, HasSubstr("rank 5: 5/6 1/2 2/3 first-host:4711\n"));
  EXPECT_THAT(job.errors, HasSubstr("tesserae: rank 5 of 6 exited with code 7; the other ranks were ended"));
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
  os::sleep_for(std::chrono::milliseconds(1500));  // at once it would be the same one, sent twice
  begin_ = os::now();
  job.process().signal(SIGINT);
  EXPECT_EQ(job.finish()->code, 128 + SIGINT);
  EXPECT_LT(elapsed(), 15) << "without waiting for the 20 s of grace";
  expect_nothing_left(2);
}

// Slurm's `--signal=USR1@120`, and its SIGTERM two minutes later: ranks may be saving.
TEST_F(Launcher, ASigtermAfterAWarningIsTheFirstDemand) {
  Program job = launch(2, "trap '' USR1; trap 'sleep 1; exit 0' TERM; while true; do sleep 0.05; done");
  wait_until_started(2);
  job.process().signal(SIGUSR1);
  ASSERT_TRUE(job.wait_for("stopping"));
  os::sleep_for(std::chrono::milliseconds(500));
  job.process().signal(SIGTERM);
  EXPECT_TRUE(job.finish()->success()) << job.errors;
}

// As `timeout` sends it, to its child and then to the group.
TEST_F(Launcher, ADemandThatComesTwiceIsOne) {
  Program job = launch(2, "trap 'sleep 1; exit 0' TERM; while true; do sleep 0.05; done");
  wait_until_started(2);
  for (int time = 0; time < 2; ++time) {
    job.process().signal(SIGTERM);
    os::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(job.finish()->success()) << job.errors;
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

// What is wrong may stay so: as often as ranks may be lost.
TEST_F(Launcher, RanksThatAllFailAndLiveMeetAgainWhereNoneWouldBeReplaced) {
  for (const int failures : {2, 3}) {
    Program job({LAUNCH_RANKS, "3", "fail"}, {{"MIN_RANKS", "1"}, {"FAILURES", std::to_string(failures)}});
    const auto exit = job.finish();
    ASSERT_TRUE(exit) << job.errors;
    EXPECT_EQ(exit->code, failures == 2 ? 0 : 3) << job.errors;
    EXPECT_EQ(job.output, failures == 2 ? "epoch 2\n" : "");
  }
}

// Whoever is left holds the state of more ranks until it has asked for a number.
TEST_F(Launcher, ThoseLeftMeetAgainAsSuch) {
  Program job({LAUNCH_RANKS, "3", "fail"}, {{"MIN_RANKS", "1"}, {"LOSS", "yes"}, {"FAILURES", "2"}});
  const auto exit = job.finish();
  ASSERT_TRUE(exit) << job.errors;
  EXPECT_TRUE(exit->success()) << job.errors;
  EXPECT_EQ(job.output, "epoch 2, of those left\n");
}

TEST_F(Launcher, AProgramThatIsNotThereIsAnError) {
  EXPECT_THROW(run_local_job({.ranks = 2, .command = {"/nowhere/program"}, .environment = {}}), IoError);
  EXPECT_THROW(run_local_job({.ranks = 0, .command = {"true"}, .environment = {}}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::launch
