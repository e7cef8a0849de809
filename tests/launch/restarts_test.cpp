#include "tesserae/launch/restarts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/base/error.h"
#include "tests/launch/launcher_job.h"

namespace tesserae::launch {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

class Restarting : public Launcher {
 protected:
  /// The script of rank 0, which has $TRY, from 0 on. The other one waits for its end.
  int run(const std::string& script, int most, const std::function<void(LocalJob&, const JobEnd&)>& prepare = {}) {
    const std::string first =
        "[ $RANK = 0 ] || until [ -e $FOLDER/done ]; do sleep 0.02; done; [ $RANK = 0 ] || exit 0; "
        "TRY=${TORCHELASTIC_RESTART_COUNT:-0}; "
        "echo $TRY >> $FOLDER/tries; ";
    LocalJob job{.ranks = 2, .command = {"sh", "-c", first + script}, .environment = {{"FOLDER", folder_}}};
    return run_with_restarts(
        job,
        {.most = most, .first_pause = milliseconds(50), .longest_pause = std::chrono::seconds(10), .prepare = prepare});
  }
  std::string tries() const { return os::files().read(folder_ + "/tries"); }
};

TEST_F(Restarting, AnotherTryMayGoWell) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run("[ $TRY = 2 ] || { echo failed in try $TRY >&2; exit 5; }; touch $FOLDER/done", 3), 0);
  EXPECT_EQ(tries(), "0\n1\n2\n");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("all ranks begin again in 0.05 s (1 of 3)"));
  EXPECT_THAT(said, HasSubstr("all ranks begin again in 0.1 s (2 of 3)"));
}

TEST_F(Restarting, NotMoreOftenThanWasSaid) {
  EXPECT_EQ(run("kill -9 $$", 2), 128 + SIGKILL);
  EXPECT_EQ(tries(), "0\n1\n2\n") << "who is killed may have been unlucky, also twice";
}

TEST_F(Restarting, TheSameErrorTwiceInARowIsTheEnd) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(run("echo shapes do not match >&2; exit 5", 9), 5);
  EXPECT_EQ(tries(), "0\n1\n");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the same error ended the try before"));
}

TEST_F(Restarting, WhatCannotWorkIsNotTriedAgain) {
  EXPECT_EQ(run(cat("exit ", exit_unusable), 9), exit_unusable);
  EXPECT_EQ(tries(), "0\n");
}

TEST_F(Restarting, TheNextTryMayBeAnother) {
  std::vector<int> ends;
  const auto prepare = [&](LocalJob& job, const JobEnd& end) {
    ends.push_back(end.status);
    EXPECT_EQ(end.error, "no checkpoint");
    job.command = {"true"};
  };
  EXPECT_EQ(run("echo no checkpoint >&2; exit 7", 1, prepare), 0);
  EXPECT_THAT(ends, ElementsAre(7));
}

TEST_F(Restarting, ASignalInThePauseEndsIt) {
  LocalJob job{.ranks = 1, .command = {"sh", "-c", "exit 5"}, .environment = {}};
  const auto run_with_a_signal = [&job] {
    std::thread([] {
      os::sleep_for(milliseconds(1500));
      ::kill(::getpid(), SIGTERM);
    }).detach();
    return run_with_restarts(
        job, {.most = 1, .first_pause = std::chrono::minutes(10), .longest_pause = std::chrono::minutes(10)});
  };
  EXPECT_EQ(run_with_a_signal(), 128 + SIGTERM);
  job.early_exit_code = 75;  // a scheduler starts it again
  EXPECT_EQ(run_with_a_signal(), 75);
}

TEST_F(Restarting, SeveralHostsAreBegunAgainByTheirScheduler) {
  const LocalJob job{.hosts = 2, .port = 4711, .command = {"true"}, .environment = {}};
  EXPECT_THROW(run_with_restarts(job, {.most = 1}), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::launch
