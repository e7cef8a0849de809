#include "tesserae/preemption/watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::preemption {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class WatchTest : public testing::Test {
 protected:
  ~WatchTest() override { os::files().remove_all(file_); }

  Sources quick() const { return {.file = file_, .every = 1ms}; }

  static std::optional<Notice> wait_for(const Watch& watch) {
    const os::Deadline end(60s);
    while (!watch.notice() && !end.passed()) os::sleep_for(2ms);
    return watch.notice();
  }

  const std::string file_ = cat(testing::TempDir(), "tesserae-notice-", ::getpid());
};

TEST_F(WatchTest, HearsSignalsAtOnce) {
  const Watch watch{Sources{}};
  EXPECT_FALSE(watch.notice());
  ::raise(SIGUSR1);
  ASSERT_TRUE(watch.notice());
  EXPECT_EQ(watch.notice()->signal, SIGUSR1);
  EXPECT_EQ(watch.notice()->reason, "SIGUSR1");
}

TEST_F(WatchTest, HearsAFile) {
  const Watch watch(quick());
  os::sleep_for(200ms);
  EXPECT_FALSE(watch.notice());
  os::files().write(file_, "");
  ASSERT_TRUE(wait_for(watch));
  EXPECT_EQ(watch.notice()->signal, SIGTERM);
  EXPECT_EQ(watch.notice()->reason, "the file " + file_);
  os::files().remove(file_);
  EXPECT_TRUE(watch.notice()) << "once asked it stays so";
}

TEST_F(WatchTest, AFileThatIsOlderThanTheProcessAskedAnother) {
  os::files().write(file_, "");
  std::filesystem::last_write_time(file_, std::filesystem::file_time_type::clock::now() - 1h);
  testing::internal::CaptureStderr();
  const Watch watch(quick());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr(file_ + " is older than this process"));
  os::sleep_for(300ms);
  EXPECT_FALSE(watch.notice());
  os::files().write(file_, "");
  EXPECT_TRUE(wait_for(watch));
}

TEST_F(WatchTest, AFileFromTheTimeOfTheStartCounts) {
  os::files().write(file_, "");  // this process has begun before
  const Watch watch(quick());
  EXPECT_TRUE(wait_for(watch));
}

TEST_F(WatchTest, HearsACommand) {
  const Watch watch{Sources{.command = "test -e " + file_, .every = 1ms}};
  os::sleep_for(200ms);
  EXPECT_FALSE(watch.notice());
  os::files().write(file_, "");
  ASSERT_TRUE(wait_for(watch));
  EXPECT_EQ(watch.notice()->reason, cat("the command `test -e ", file_, "`"));
}

/// As the workers of a loader of data do.
TEST_F(WatchTest, AForkedChildEndsWithoutItsThread) {
  const pid_t child = [this] {
    const Watch watch{Sources{.file = file_, .command = "sleep 1000", .every = 1ms}};
    os::sleep_for(200ms);
    const pid_t id = ::fork();
    if (id == 0) ::alarm(60);
    return id;
  }();  // both let go of it
  if (child == 0) ::_exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << status;
}

}  // namespace
}  // namespace tesserae::preemption
