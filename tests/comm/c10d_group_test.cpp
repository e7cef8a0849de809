#include "tesserae/comm/transports/c10d_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tesserae::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Of a device that tells nothing by its work, as NCCL: an operation that was aborted has ended, whatever it left.
struct Quiet final : c10d::Backend {
  Quiet() : Backend(0, 2) { setBoundDeviceId(c10::Device(c10::kCPU, 0)); }
  const std::string getBackendName() const override { return "quiet"; }
  void eagerConnectSingleDevice(at::Device /*device*/) override {}
  void shutdown() override {}
  c10d::ErrorType getError() override { return error; }

  c10d::ErrorType error = c10d::ErrorType::SUCCESS;
};

TEST(C10dGroup, WhatFailedOnTheDeviceIsAskedForBeforeItsResultIsRead) {
  const auto backend = c10::make_intrusive<Quiet>();
  C10dGroup group("gather.0-1", {0, 1}, backend, {.connects = true});
  EXPECT_NO_THROW(group.require_intact());
  backend->error = c10d::ErrorType::TIMEOUT;
  EXPECT_THAT([&] { group.require_intact(); }, ThrowsMessage<Timeout>(HasSubstr("longer than the deadline")));
  for (const auto failure : {c10d::ErrorType::COMM_ERROR, c10d::ErrorType::REMOTE_ERROR}) {
    backend->error = failure;
    EXPECT_THAT([&] { group.require_intact(); }, ThrowsMessage<CommError>(HasSubstr("has failed")));
  }
}

}  // namespace
}  // namespace tesserae::comm
