#include "tesserae/base/checked.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

TEST(Checked, ComputesWhatFits) {
  EXPECT_EQ(checked_mul(1 << 30, 1 << 30), int64_t{1} << 60);
  EXPECT_EQ(checked_add(INT64_MAX - 1, 1), INT64_MAX);
  EXPECT_EQ(checked_mul(INT64_MIN, 1), INT64_MIN);
}

TEST(Checked, RefusesWhatDoesNot) {
  EXPECT_THROW(checked_mul(int64_t{1} << 32, int64_t{1} << 31), InvalidArgument);
  EXPECT_THROW(checked_mul(INT64_MIN, -1), InvalidArgument);
  EXPECT_THROW(checked_add(INT64_MAX, 1), InvalidArgument);
  EXPECT_THROW(checked_add(INT64_MIN, -1), InvalidArgument);
}

TEST(Checked, RoundsUp) {
  EXPECT_EQ(round_up(0, 128), 0);
  EXPECT_EQ(round_up(1, 128), 128);
  EXPECT_EQ(round_up(128, 128), 128);
  EXPECT_EQ(round_up(129, 128), 256);
  EXPECT_THROW(round_up(INT64_MAX, 128), InvalidArgument);
}

}  // namespace
}  // namespace tesserae
