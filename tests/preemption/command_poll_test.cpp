#include "tesserae/preemption/command_poll.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::preemption {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class Command : public testing::Test {
 protected:
  Command() { os::files().make_directories(folder_); }
  ~Command() override { os::files().remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  /// Polls until `enough`, at most a minute; whether the command said yes meanwhile.
  template <class Condition>
  static bool poll_until(CommandPoll& poll, const Condition& enough) {
    const os::Deadline end(60s);
    bool yes = false;
    while (!enough() && !end.passed()) {
      yes = poll.poll() || yes;
      os::sleep_for(2ms);
    }
    EXPECT_TRUE(enough());
    return yes;
  }

  size_t runs() const { return os::files().exists(path("runs")) ? os::files().read(path("runs")).size() : 0; }

  const std::string folder_ = cat(testing::TempDir(), "tesserae-command-", ::getpid());
};

TEST_F(Command, SaysYesByStatusZero) {
  CommandPoll poll(cat("printf x >> ", path("runs"), "; test -e ", path("notice")), 1ms, 60s);
  EXPECT_FALSE(poll_until(poll, [&] { return runs() >= 3; }));
  os::files().write(path("notice"), "");
  bool yes = false;
  poll_until(poll, [&] { return yes = yes || poll.poll(); });
}

TEST_F(Command, IsRunSoOftenAndOneAtATime) {
  CommandPoll poll(cat("printf x >> ", path("runs"), "; sleep 1; exit 1"), 1h, 60s);
  poll_until(poll, [&] { return runs() == 1; });
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(poll.poll());
  EXPECT_EQ(runs(), 1U);
}

TEST_F(Command, NeverWaitsAndKillsWhatIsLate) {
  CommandPoll poll(cat("printf x >> ", path("runs"), "; sleep 1000 & echo $! > ", path("child"), "; wait"), 1ms, 200ms);
  testing::internal::CaptureStderr();
  const os::TimePoint begin = os::now();
  poll.poll();
  EXPECT_LT(os::now() - begin, 10s);
  EXPECT_FALSE(poll_until(poll, [&] { return runs() >= 3; }));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("was killed after 0.2 s: taken as no"));
}

TEST_F(Command, WhatItHasStartedEndsWithIt) {
  const std::string script =
      cat("sleep 1000 & echo $! > ", path("id"), ".new; mv ", path("id"), ".new ", path("id"), "; wait");
  {
    CommandPoll poll(script, 1ms, 60s);
    poll_until(poll, [&] { return os::files().exists(path("id")); });
  }
  const pid_t child = std::stoi(os::files().read(path("id")));
  const os::Deadline end(60s);
  while (os::start_time(child) && !end.passed()) os::sleep_for(5ms);
  EXPECT_FALSE(os::start_time(child));
}

TEST_F(Command, ThatCannotRunIsNoAndWarnedOfOnce) {
  CommandPoll poll(cat("printf x >> ", path("runs"), "; /no/such/program"), 1ms, 60s);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(poll_until(poll, [&] { return runs() >= 4; }));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("exited with code 127: taken as no, and not said again"));
  EXPECT_EQ(said.find("taken as no"), said.rfind("taken as no"));
}

}  // namespace
}  // namespace tesserae::preemption
