#include "tesserae/comm/liveness/pulses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr milliseconds beat{250};

class PulsesTest : public ::testing::Test {
 protected:
  /// What is seen of ranks 1 and 2 after so many milliseconds.
  std::optional<std::vector<int>> at(int after, int64_t first, int64_t second) {
    return pulses_.look({1, 2}, {first, second}, begin_ + milliseconds(after));
  }

  const Pulses::TimePoint begin_ = std::chrono::steady_clock::now();
  Pulses pulses_{beat};
};

TEST_F(PulsesTest, WhoBeatsBetweenTwoLooksLives) {
  EXPECT_EQ(at(0, 7, 9), std::nullopt) << "one look tells nothing";
  EXPECT_THAT(at(500, 9, 11), Optional(IsEmpty()));
}

TEST_F(PulsesTest, WhoIsStillForLongIsSilent) {
  at(0, 7, 9);
  EXPECT_EQ(at(1000, 11, 9), std::nullopt) << "rank 2 may have been held up";
  at(2400, 15, 9);
  EXPECT_EQ(at(3499, 19, 9), std::nullopt) << "rank 1 lives, rank 2 may";
  EXPECT_THAT(at(3500, 20, 9), Optional(ElementsAre(2)));
}

// A counter that changed while nobody looked may have changed long ago.
TEST_F(PulsesTest, ABeatOfUnknownTimeIsNoSignOfLife) {
  at(0, 7, 9);
  EXPECT_EQ(at(2000, 8, 10), std::nullopt);
  EXPECT_THAT(at(2300, 9, 11), Optional(IsEmpty()));
}

// Who was stopped, and goes on, beats again.
TEST_F(PulsesTest, WhoWasSilentMayComeBack) {
  at(0, 7, 9);
  at(3400, 19, 9);
  ASSERT_THAT(at(3500, 20, 9), Optional(ElementsAre(2)));
  EXPECT_THAT(at(3900, 21, 10), Optional(IsEmpty()));
}

TEST_F(PulsesTest, StillIsWhoWasLookedAtAndHasNotBeatenSince) {
  EXPECT_FALSE(pulses_.still_for(milliseconds(0), 1, begin_)) << "never looked at";
  at(0, 7, 9);
  at(800, 8, 9);
  EXPECT_FALSE(pulses_.still_for(milliseconds(1000), 1, begin_ + milliseconds(1000)));
  EXPECT_TRUE(pulses_.still_for(milliseconds(1000), 2, begin_ + milliseconds(1000)));
}

}  // namespace
}  // namespace tesserae::comm
