#include "tesserae/os/clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <climits>

#include "tesserae/os/seconds.h"

namespace tesserae::os {
namespace {

using namespace std::chrono_literals;

std::atomic<int> alarms{0};

TEST(Clock, SleepsThroughSignals) {
  struct sigaction action {
  }, earlier{};
  action.sa_handler = [](int) { ++alarms; };
  ::sigaction(SIGALRM, &action, &earlier);
  const itimerval every_5_ms{{0, 5000}, {0, 5000}};
  ::setitimer(ITIMER_REAL, &every_5_ms, nullptr);
  const TimePoint start = now();
  sleep_for(60ms);
  const auto slept = now() - start;
  const itimerval off{};
  ::setitimer(ITIMER_REAL, &off, nullptr);
  ::sigaction(SIGALRM, &earlier, nullptr);
  EXPECT_GE(slept, 60ms);
  EXPECT_GT(alarms, 0);
}

TEST(Clock, DeadlinePasses) {
  const Deadline deadline(20ms);
  EXPECT_FALSE(deadline.passed());
  EXPECT_LE(deadline.remaining(), 20ms);
  EXPECT_GT(deadline.poll_milliseconds(), 0);
  sleep_for(21ms);
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(deadline.remaining(), 0ns);
  EXPECT_EQ(deadline.poll_milliseconds(), 0);
}

TEST(Clock, DeadlineMayBeForEverOrOver) {
  EXPECT_FALSE(Deadline(std::chrono::nanoseconds::max()).passed());
  EXPECT_EQ(Deadline(std::chrono::nanoseconds::max()).poll_milliseconds(), INT_MAX);
  EXPECT_TRUE(Deadline(-1s).passed());
  for (const double never : {1e10, 1e300}) EXPECT_FALSE(Deadline(milliseconds(never)).passed()) << never;
}

TEST(Clock, PollMillisecondsAreRoundedUp) {
  // A deadline of less than a millisecond must not turn poll(2) into a busy loop.
  EXPECT_EQ(Deadline(1h).poll_milliseconds(), 3'600'000);
}

TEST(Clock, UtcTime) {
  EXPECT_THAT(utc_time(), ::testing::MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"));
}

}  // namespace
}  // namespace tesserae::os
