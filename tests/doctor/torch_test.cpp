#include "tesserae/doctor/torch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

namespace tesserae::doctor {
namespace {

using ::testing::HasSubstr;

TorchFacts with_gpus(int count, int ranks) {
  return {.built_against = "2.13.0+cu130",
          .torch_has_cuda = true,
          .has_nccl = true,
          .devices = {{"cuda", count}},
          .local_ranks = ranks};
}

TEST(DoctorTorch, EnoughDevicesAreGood) {
  EXPECT_EQ(worst_of(examine(with_gpus(8, 8))), Verdict::good);
  EXPECT_EQ(worst_of(examine(with_gpus(1, 4))), Verdict::good);  // each rank is shown one
}

TEST(DoctorTorch, FewerDevicesThanRanksAreWrong) {
  const Findings found = examine(with_gpus(4, 8));
  EXPECT_EQ(worst_of(found), Verdict::wrong);
  EXPECT_THAT(found.at(1).advice, HasSubstr("at most 4 ranks"));
}

TEST(DoctorTorch, DevicesThatCannotCommunicateAreWrong) {
  TorchFacts torch = with_gpus(8, 8);
  torch.has_nccl = false;
  EXPECT_EQ(worst_of(examine(torch)), Verdict::wrong);
}

TEST(DoctorTorch, ATorchForGpusWithoutOneIsAWarning) {
  EXPECT_EQ(worst_of(examine(with_gpus(0, 1))), Verdict::warning);
}

TEST(DoctorTorch, LooksAtThisTorch) {
  const TorchFacts torch = TorchFacts::look(1);
  EXPECT_EQ(torch.built_against, TORCH_VERSION);
}

}  // namespace
}  // namespace tesserae::doctor
