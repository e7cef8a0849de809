#include "tesserae/offload/memory_limit.h"

#include <gtest/gtest.h>

#include "tests/os/scratch.h"

namespace tesserae::offload {
namespace {

constexpr int64_t MiB = int64_t{1} << 20;

class MemoryLimitTest : public os::Scratch {
 protected:
  std::shared_ptr<Disk> disk_ = std::make_shared<Disk>(DiskOptions{folder_, MemoryLimit::at_first});
};

TEST_F(MemoryLimitTest, GivesOutWhatAStepLeavesEverySecondStep) {
  disk_->reserve(1024 * MiB);
  MemoryLimit limit(disk_, 640 * MiB);  // of which 20 are a margin
  EXPECT_FALSE(limit.after_step(220 * MiB));
  EXPECT_EQ(disk_->memory(), MemoryLimit::at_first + 300 * MiB);
  EXPECT_FALSE(limit.after_step(220 * MiB)) << "what it gave out was not used for a whole step yet";
  EXPECT_EQ(disk_->memory(), MemoryLimit::at_first + 300 * MiB);
  EXPECT_FALSE(limit.after_step(520 * MiB));
  EXPECT_EQ(disk_->memory(), MemoryLimit::at_first + 375 * MiB);
}

TEST_F(MemoryLimitTest, TakesAnExcessBackForGood) {
  disk_->reserve(1024 * MiB);
  MemoryLimit limit(disk_, 640 * MiB);
  limit.after_step(220 * MiB);
  EXPECT_TRUE(limit.after_step(700 * MiB)) << "beyond the limit: said once";
  const int64_t ceiling = MemoryLimit::at_first + 300 * MiB - 80 * MiB;
  EXPECT_EQ(disk_->memory(), ceiling);
  for (int step = 0; step < 4; ++step) {
    EXPECT_FALSE(limit.after_step(200 * MiB));
    EXPECT_EQ(disk_->memory(), ceiling);
  }
  EXPECT_FALSE(limit.after_step(2000 * MiB));
  EXPECT_EQ(disk_->memory(), MemoryLimit::at_first) << "the least with which a step makes progress";
}

TEST_F(MemoryLimitTest, GivesOutNoMoreThanThereIsState) {
  MemoryLimit limit(disk_, 4096 * MiB);
  limit.after_step(100 * MiB);
  EXPECT_EQ(disk_->memory(), MemoryLimit::without_limit);
}

TEST_F(MemoryLimitTest, OrThereIsNone) {
  MemoryLimit limit(disk_, std::nullopt);
  EXPECT_EQ(disk_->memory(), MemoryLimit::without_limit);
  EXPECT_FALSE(limit.after_step(10'000 * MiB));
  EXPECT_EQ(disk_->memory(), MemoryLimit::without_limit);
}

TEST_F(MemoryLimitTest, WithoutADiskItOnlySpeaks) {
  MemoryLimit limit({}, 100 * MiB);
  EXPECT_FALSE(limit.after_step(100 * MiB));
  EXPECT_TRUE(limit.after_step(101 * MiB));
  EXPECT_FALSE(limit.after_step(101 * MiB));
}

TEST(MemoryOfRank, IsAnEqualPartOfTheHosts) {
  EXPECT_EQ(memory_of_rank(600 * MiB, 4), 150 * MiB);
}

}  // namespace
}  // namespace tesserae::offload
