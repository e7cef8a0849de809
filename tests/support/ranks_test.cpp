#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

#include "tesserae/os/clock.h"

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
