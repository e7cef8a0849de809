#include "tesserae/base/median.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

TEST(Median, IsTheMiddleValueInWhateverOrder) {
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({3, 1, 2}), 2);
}

TEST(Median, OfAnEvenCountIsTheMeanOfTheTwoInTheMiddle) {
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({100, 1}), 50.5);
}

}  // namespace
}  // namespace tesserae
