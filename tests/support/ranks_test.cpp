#include "tests/support/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "tesserae/os/clock.h"
#include "tests/support/child.h"

namespace tesserae::testing {

RANK_MAIN(tells_who_it_is) {
  report("rank", std::atof(std::getenv("RANK")));
  report("size", std::atof(std::getenv("WORLD_SIZE")));
  EXPECT_EQ(args, RankArgs({"a", "b c"}));
}

RANK_MAIN(fails_on_rank_1) {
  EXPECT_NE(std::string(std::getenv("RANK")), "1") << "as it should";
}

RANK_MAIN(hangs_on_rank_0) {
  if (std::string(std::getenv("RANK")) == "0") os::sleep_for(std::chrono::hours(1));
}

static int remembered = 0;

RANK_MAIN(tells_what_it_is) {
  report("remembered", remembered);
  int open = 0;
  for (int descriptor = 3; descriptor < 100; ++descriptor) open += ::fcntl(descriptor, F_GETFD) >= 0;
  report("open", open);
}

RANK_MAIN(dies) {
  std::raise(SIGKILL);
}

TEST(RunRanks, EachRankKnowsItsPlace) {
  const auto results = run_ranks("tells_who_it_is", 3, {"a", "b c"});
  ASSERT_TRUE(results.all_succeeded()) << results.text();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(results[rank].value("rank"), rank);
    EXPECT_EQ(results[rank].value("size"), 3);
  }
}

// A copy is there at once. It has no end of another rank's pipe: else nobody would hear that one end.
TEST(RunRanks, ARankIsACopyWhereThatCanBe) {
  remembered = 1;
  RankJob job;
  job.main = "tells_what_it_is";
  const bool one_thread = may_go_on_as_a_copy();
  const auto copies = run_ranks(job);
  std::jthread other([](const std::stop_token& stop) {
    while (!stop.stop_requested()) os::sleep_for(std::chrono::milliseconds(1));
  });
  const auto beside_a_thread = run_ranks(job);
  other = {};
  const auto after_a_thread = run_ranks(job);
  job.environment = {{"SOMETHING", "else"}};
  const auto with_environment = run_ranks(job);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(copies[rank].value("remembered"), one_thread) << copies.text();
    EXPECT_EQ(copies[rank].value("open"), 0) << copies.text();
    EXPECT_EQ(beside_a_thread[rank].value("remembered"), 0);
    EXPECT_EQ(after_a_thread[rank].value("remembered"), 0);
    EXPECT_EQ(with_environment[rank].value("remembered"), 0);
  }
}

TEST(RunRanks, AFailedExpectationFailsTheRank) {
  const auto results = run_ranks("fails_on_rank_1", 2);
  EXPECT_FALSE(results.all_succeeded());
  EXPECT_TRUE(results[0].exit.success());
  EXPECT_EQ(results[1].exit.code, 1);
  EXPECT_NE(results[1].output.find("as it should"), std::string::npos) << results.text();
}

TEST(RunRanks, ARankThatHangsIsKilledAtTheDeadline) {
  const auto results = run_ranks("hangs_on_rank_0", 2, {}, std::chrono::seconds(3));
  EXPECT_TRUE(results[0].out_of_time);
  EXPECT_EQ(results[0].exit.signal, SIGKILL);
  EXPECT_TRUE(results[1].exit.success()) << results.text();
}

TEST(RunRanks, ARankLeftBehindIsNoFault) {
  RankJob job;
  job.main = "hangs_on_rank_0";
  job.left_behind = {0};
  const auto results = run_ranks(job);
  EXPECT_FALSE(results[0].out_of_time);
  EXPECT_EQ(results[0].exit.signal, SIGKILL);
}

TEST(RunRanks, AKilledRankIsSeen) {
  EXPECT_EQ(run_ranks("dies", 1)[0].exit.signal, SIGKILL);
}

TEST(RunRanks, AnUnknownMainIsToldAsSuch) {
  const auto results = run_ranks("nobody", 1);
  EXPECT_EQ(results[0].exit.code, 2);
  EXPECT_NE(results[0].output.find("RANK_MAIN(nobody)"), std::string::npos);
}

}  // namespace tesserae::testing
