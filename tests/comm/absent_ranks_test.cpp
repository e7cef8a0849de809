#include "tesserae/comm/liveness/absent_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Optional;

using Ranks = std::optional<std::vector<int>>;

Ranks idle(const std::vector<int>& ranks) {
  return ranks;
}

/// Of rank 0 of four, whose operation has blocked for a deadline of 10 s.
class AbsentRanksTest : public ::testing::Test {
 protected:
  Ranks at(int after, const Ranks& seen, const std::vector<int>& others = {1, 2, 3}) {
    return absent_.look(others, seen, seconds(10), begin_ + milliseconds(after));
  }

  const AbsentRanks::TimePoint begin_ = std::chrono::steady_clock::now();
  AbsentRanks absent_{4, milliseconds(3500)};
};

TEST_F(AbsentRanksTest, IsWhoIsInNoOperationWheneverOneLooks) {
  EXPECT_EQ(at(0, idle({2})), std::nullopt);
  EXPECT_EQ(at(2999, idle({2})), std::nullopt);
  EXPECT_THAT(at(3000, idle({2})), Optional(ElementsAre(2)));
}

TEST_F(AbsentRanksTest, WhoComesLateIsNotNamed) {
  at(0, idle({1, 2}));
  at(1000, idle({2}));     // rank 1 has come to an operation ...
  at(2000, idle({1, 2}));  // ... and left it: it computes between two
  EXPECT_THAT(at(3000, idle({1, 2})), Optional(ElementsAre(2)));
}

TEST_F(AbsentRanksTest, NobodyIsWhereAllWait) {
  EXPECT_THAT(at(0, idle({})), Optional(IsEmpty()));
  at(100, idle({3}));
  EXPECT_THAT(at(500, idle({})), Optional(IsEmpty()));
}

TEST_F(AbsentRanksTest, NobodyIsWhereEverySuspectHasWaitedOnce) {
  at(0, idle({1, 2}));
  at(500, idle({1}));
  EXPECT_THAT(at(1000, idle({2})), Optional(IsEmpty()));
}

// A reader of data that all use, say: it is none of them that hangs.
TEST_F(AbsentRanksTest, NobodyIsWhereMoreThanHalfAreInNoOperation) {
  at(0, idle({1, 2, 3}));
  EXPECT_THAT(at(3000, idle({1, 2, 3})), Optional(IsEmpty()));
}

TEST_F(AbsentRanksTest, HalfOfTheJobCanBe) {
  at(0, idle({1, 3}));
  EXPECT_THAT(at(3000, idle({1, 3})), Optional(ElementsAre(1, 3)));
}

TEST_F(AbsentRanksTest, NobodyIsWhileTheStoreCannotBeAsked) {
  EXPECT_EQ(at(0, std::nullopt), std::nullopt);
  EXPECT_EQ(at(1500, idle({2})), std::nullopt);
  EXPECT_THAT(at(3000, std::nullopt), Optional(IsEmpty()));
}

// Of another deadline, later: what was seen before says nothing.
TEST_F(AbsentRanksTest, AfterAPauseOneLooksAnew) {
  at(0, idle({2}));
  EXPECT_EQ(at(60'000, idle({2})), std::nullopt);
  EXPECT_THAT(at(63'000, idle({2})), Optional(ElementsAre(2)));
}

TEST_F(AbsentRanksTest, WhoIsLostOrHasLeftIsNotNamed) {
  at(0, idle({2, 3}), {1, 2});
  EXPECT_THAT(at(3000, idle({2, 3}), {1, 2}), Optional(ElementsAre(2)));
}

TEST(AbsentRanks, AreLookedForATenthOfTheDeadlineWithinBounds) {
  EXPECT_EQ(AbsentRanks::confirmation(seconds(1)), seconds(3));
  EXPECT_EQ(AbsentRanks::confirmation(seconds(50)), seconds(5));
  EXPECT_EQ(AbsentRanks::confirmation(std::chrono::hours(1)), seconds(8));
}

}  // namespace
}  // namespace tesserae::comm
