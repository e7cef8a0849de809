// Lanes that are streams, on a device whose streams are late: what waits for a ticket sees what the task did, and a
// task sees what the caller had queued.

#include "tesserae/comm/lane.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tests/device/device.h"

namespace tesserae::comm {
namespace {

constexpr int64_t kElements = 1 << 20;
constexpr int kRepeats = 10;

at::Tensor on_host(float value) {
  return at::full({kElements}, value);
}

}  // namespace

TEST(DeviceLane, ATaskComesAfterWhatTheCallerQueued) {
  const c10::Device device = testing::test_device();
  Lane lane("test", Lane::Kind::stream, device);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const at::Tensor data = at::zeros({kElements}, at::TensorOptions().device(device));
    testing::keep_busy(device);
    data.fill_(5);
    at::Tensor copy;
    const Ticket ticket = lane.submit([&] { copy = data.clone(); });
    ticket.wait();
    data.fill_(7);  // after the task, which reads
    EXPECT_TRUE(at::equal(copy.cpu(), on_host(5))) << "repeat " << repeat;
  }
}

TEST(DeviceLane, WhoWaitsForTheTicketComesAfterTheTask) {
  const c10::Device device = testing::test_device();
  Lane lane("test", Lane::Kind::stream, device);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const at::Tensor data = at::zeros({kElements}, at::TensorOptions().device(device));
    const Ticket ticket = lane.submit([&] {
      testing::keep_busy(device);
      data.fill_(3);
    });
    ticket.wait();
    data.add_(1);
    EXPECT_TRUE(at::equal(data.cpu(), on_host(4))) << "repeat " << repeat;
  }
}

}  // namespace tesserae::comm
