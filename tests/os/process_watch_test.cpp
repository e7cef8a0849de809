#include "tesserae/os/process_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tesserae/os/process.h"

namespace tesserae::os {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

Process sleeper() {
  return Process::spawn({.arguments = {"sleep", "1000"}, .die_with_parent = true});
}

TEST(ProcessWatch, SeesAKillBeforeAnyoneReapsTheProcess) {
  Process child = sleeper();
  const ProcessWatch watch(child.id(), start_time(child.id()));
  EXPECT_FALSE(watch.gone());
  EXPECT_FALSE(watch.wait_gone(Deadline(20ms)));
  child.signal(SIGKILL);
  EXPECT_TRUE(watch.wait_gone(Deadline(60s)));
  EXPECT_TRUE(watch.gone());
  EXPECT_TRUE(child.poll().has_value());
  EXPECT_TRUE(watch.gone());
}

TEST(ProcessWatch, AStoppedProcessIsNotGone) {
  Process child = sleeper();
  const ProcessWatch watch(child.id());
  child.signal(SIGSTOP);
  EXPECT_FALSE(watch.wait_gone(Deadline(50ms)));
  child.signal(SIGCONT);
}

TEST(ProcessWatch, AnotherProcessOfTheSameIdCountsAsGone) {
  Process child = sleeper();
  const ProcessWatch watch(child.id(), *start_time(child.id()) + 1);
  EXPECT_TRUE(watch.gone());
  EXPECT_EQ(watch.descriptor(), -1);
  EXPECT_TRUE(ProcessWatch(0x3fffffff).gone()) << "no process has that id";
}

TEST(ProcessWatch, ManyAreWaitedForTogether) {
  Process a = sleeper(), b = sleeper();
  const ProcessWatch watch_a(a.id()), watch_b(b.id());
  if (watch_a.descriptor() < 0) GTEST_SKIP() << "this kernel has no pidfd";
  b.signal(SIGKILL);
  EXPECT_THAT(wait_readable({watch_a.descriptor(), watch_b.descriptor()}, Deadline(60s)),
              ElementsAre(watch_b.descriptor()));
}

}  // namespace
}  // namespace tesserae::os
