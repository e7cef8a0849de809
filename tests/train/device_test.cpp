#include "tesserae/train/device.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tesserae::train
