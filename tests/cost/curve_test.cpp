#include "tesserae/cost/curve.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tesserae/base/error.h"

namespace tesserae::cost {
namespace {

TEST(Curve, IsStraightInLogarithmsBetweenItsPointsAndLevelBeyond) {
  const Curve curve({{.size = 100, .rate = 40}, {.size = 1, .rate = 10}});
  EXPECT_TRUE(curve.known());
  EXPECT_DOUBLE_EQ(curve.at(1), 10);
  EXPECT_DOUBLE_EQ(curve.at(10), 20) << "half of the way, in both";
  EXPECT_DOUBLE_EQ(curve.at(100), 40);
  EXPECT_DOUBLE_EQ(curve.at(0.001), 10);
  EXPECT_DOUBLE_EQ(curve.at(1e9), 40);
  EXPECT_EQ(curve.points().front().size, 1) << "in order";
  EXPECT_DOUBLE_EQ(Curve(7).at(12345), 7);
  EXPECT_FALSE(Curve().known());
  EXPECT_THROW((void)Curve().at(1), InvalidArgument);
}

TEST(Curve, RefusesWhatIsNoRate) {
  constexpr double nothing = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(Curve(std::vector<Curve::Point>{}), InvalidArgument);
  EXPECT_THROW(Curve({{.size = 1, .rate = 1}, {.size = 1, .rate = 2}}), InvalidArgument);
  for (const double wrong : {0.0, -1.0, nothing, std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(Curve({{.size = 1, .rate = wrong}}), InvalidArgument) << wrong;
    EXPECT_THROW(Curve({{.size = wrong, .rate = 1}}), InvalidArgument) << wrong;
  }
}

}  // namespace
}  // namespace tesserae::cost
