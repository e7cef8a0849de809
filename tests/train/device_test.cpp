#include "tesserae/train/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tesserae/config/json.h"

namespace tesserae::train {
namespace {

TEST(TrainDevice, ARankHasTheDeviceOfItsNumber) {
  for (const bool chosen : {false, true}) {
    EXPECT_EQ(device_index(0, 1, chosen), 0);
    EXPECT_EQ(device_index(3, 8, chosen), 3);
  }
}

TEST(TrainDevice, RanksThatAreShownOneDeviceEachHaveThat) {
  EXPECT_EQ(device_index(5, 1, /*chosen=*/true), 0);
}

TEST(TrainDevice, MoreRanksThanDevicesAreRefused) {
  EXPECT_THROW(device_index(1, 1, /*chosen=*/false), config::ConfigError);
  EXPECT_THROW(device_index(2, 2, /*chosen=*/true), config::ConfigError);
  EXPECT_THROW(device_index(0, 0, /*chosen=*/true), config::ConfigError);
}

TEST(TrainDevice, AHostLacksADeviceForTheLastOfItsRanks) {
  EXPECT_EQ(lacks_device("cpu", 1000), "");
  EXPECT_EQ(lacks_device("auto", std::max(accelerators(), 1)), "");
  if (accelerators() != 1) {  // which all may have been shown
    EXPECT_THAT(lacks_device("cuda", accelerators() + 1), ::testing::HasSubstr("has no GPU"));
  }
}

}  // namespace
}  // namespace tesserae::train
