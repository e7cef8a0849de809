#include "tesserae/os/signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tesserae/base/error.h"
#include "tesserae/os/descriptor.h"

namespace tesserae::os {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(StopSignals, RemembersSignals) {
  const StopSignals signals;
  EXPECT_EQ(signals.first(), 0);
  EXPECT_EQ(signals.count(), 0);
  EXPECT_THAT(wait_readable({signals.descriptor()}, Deadline(0s)), IsEmpty());
  ::kill(::getpid(), SIGTERM);
  ::kill(::getpid(), SIGINT);
  EXPECT_EQ(signals.first(), SIGTERM);
  EXPECT_EQ(signals.count(), 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(wait_readable({signals.descriptor()}, Deadline(60s)), ElementsAre(signals.descriptor()));
  }
}

TEST(StopSignals, AWarningIsNoDemand) {
  const StopSignals signals;
  ::raise(SIGUSR1);
  ::raise(SIGUSR1);
  EXPECT_EQ(signals.count(), 2);
  EXPECT_EQ(signals.demands(), 0);
  ::raise(SIGTERM);
  EXPECT_EQ(signals.demands(), 1);
  EXPECT_EQ(signals.first(), SIGUSR1);
}

TEST(StopSignals, AnyNumberOfThemDoesNotBlock) {
  const StopSignals signals;
  for (int i = 0; i < 100'000; ++i) ::raise(SIGINT);  // more than a pipe holds
  EXPECT_EQ(signals.count(), 100'000);
}

TEST(StopSignals, OneAtATimeAndEachStartsAnew) {
  {
    const StopSignals signals;
    EXPECT_THROW(StopSignals(), InvalidArgument);
    ::raise(SIGINT);
    EXPECT_EQ(signals.count(), 1);
  }
  const StopSignals signals;
  EXPECT_EQ(signals.count(), 0);
  EXPECT_THAT(wait_readable({signals.descriptor()}, Deadline(0s)), IsEmpty());
}

TEST(StopSignals, OnlyThoseThatAreNamed) {
  const StopSignals signals({SIGUSR1});
  struct sigaction now {};
  ASSERT_EQ(::sigaction(SIGTERM, nullptr, &now), 0);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
  ::raise(SIGUSR1);
  EXPECT_EQ(signals.first(), SIGUSR1);
  EXPECT_EQ(signal_name(SIGUSR1), "SIGUSR1");
}

int heard = 0, heard_with_facts = 0;

TEST(StopSignals, CallsTheHandlersThatWereThere) {
  struct sigaction facts {
  }, old{};
  facts.sa_sigaction = [](int, siginfo_t* info, void*) { heard_with_facts += info->si_pid == ::getpid() ? 1 : 0; };
  facts.sa_flags = SA_SIGINFO;
  ::signal(SIGTERM, [](int) { ++heard; });
  ::sigaction(SIGUSR1, &facts, &old);
  {
    const StopSignals signals;
    ::kill(::getpid(), SIGTERM);
    ::kill(::getpid(), SIGUSR1);
    EXPECT_EQ(signals.count(), 2);
    EXPECT_EQ(heard, 1);
    EXPECT_EQ(heard_with_facts, 1);
  }
  ::raise(SIGTERM);
  EXPECT_EQ(heard, 2) << "it is back";
  ::signal(SIGTERM, SIG_DFL);
  ::sigaction(SIGUSR1, &old, nullptr);
}

TEST(StopSignals, AHandlerThatWasSetSinceStays) {
  {
    const StopSignals signals;
    ::signal(SIGTERM, SIG_IGN);
  }
  ::raise(SIGTERM);
  ::signal(SIGTERM, SIG_DFL);
}

/// What a loader of data forks ends when it is told to.
TEST(StopSignals, AForkedChildIsNotAsked) {
  const StopSignals signals;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::raise(SIGTERM);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_EQ(signals.count(), 0);
}

TEST(StopSignals, TheEarlierHandlersComeBack) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGTERM, SIG_DFL);
    { const StopSignals signals; }
    ::raise(SIGTERM);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(WrittenAtSignal, IsWhatTheHandlerWrote) {
  static int file = ::memfd_create("written", 0);
  ASSERT_GE(file, 0);
  struct sigaction before {
  }, writes{};
  writes.sa_handler = [](int) { static_cast<void>(!::write(file, "here", 4)); };
  ASSERT_EQ(::sigaction(SIGUSR2, &writes, &before), 0);
  EXPECT_EQ(written_at_signal(SIGUSR2, file), "here");
  EXPECT_EQ(written_at_signal(SIGUSR2, file), "here") << "what was there before is gone";
  EXPECT_EQ(written_at_signal(SIGUSR2, -1), "");
  ::sigaction(SIGUSR2, &before, nullptr);
  ::close(file);
}

}  // namespace
}  // namespace tesserae::os
