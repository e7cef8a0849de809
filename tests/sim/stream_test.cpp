#include "tests/sim/stream.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <thread>

#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimStream : public Sim {};

// A stream that is behind by a few kernels, and then writes.
bool reads_what_another_stream_wrote(bool waits) {
  const auto producer = side_stream(), consumer = side_stream();
  const at::Tensor made = at::zeros({1000}, on_device());
  order(current(), producer);
  order(current(), consumer);
  {
    const c10::StreamGuard on(producer);
    for (int i = 0; i < 10; ++i) made.add_(1);
  }
  if (waits) order(producer, consumer);
  at::Tensor seen;
  {
    const c10::StreamGuard on(consumer);
    seen = made.mul(2);
  }
  backend().synchronizeDevice(0);
  return at::equal(seen.cpu(), at::full({1000}, 20.0f));
}

}  // namespace

TEST_F(SimStream, IsTheAcceleratorOfTorch) {
  EXPECT_EQ(at::getAccelerator(), c10::kPrivateUse1);
  EXPECT_EQ(at::accelerator::deviceCount(), device_count);
  EXPECT_EQ(device(3).str(), "sim:3");
  EXPECT_EQ(c10::Device("sim:3"), device(3));
}

TEST_F(SimStream, AMissingWaitIsFoundBySomeSeed) {
  EXPECT_LT(right([] { return reads_what_another_stream_wrote(/*waits=*/false); }), seeds);
}

TEST_F(SimStream, AWaitIsRightWithEverySeed) {
  EXPECT_EQ(right([] { return reads_what_another_stream_wrote(/*waits=*/true); }), seeds);
}

TEST_F(SimStream, TheHostDoesNotWait) {
  auto& stream = Device::at(0).stream(0);
  std::atomic<bool> go = false;
  stream.enqueue("a gate", [&] { go.wait(false); });
  const at::Tensor made = at::zeros({10}, on_device()).add_(1);
  EXPECT_FALSE(backend().queryStream(current()));
  c10::Event event(c10::kPrivateUse1);
  event.record(current());
  EXPECT_FALSE(event.query());
  go = true;
  go.notify_all();
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(backend().queryStream(current()));
}

TEST_F(SimStream, AnEventThatIsRecordedAgainDoesNotMoveAWait) {
  auto& first = Device::at(0).stream(1);
  auto& second = Device::at(0).stream(2);
  std::atomic<bool> go = false;
  std::atomic<int> value = 0;
  c10::Event event(c10::kPrivateUse1);
  const c10::Stream early(c10::Stream::UNSAFE, device(0), 1), late(c10::Stream::UNSAFE, device(0), 2);
  first.enqueue("one", [&] { value = 1; });
  event.record(early);
  event.block(late);
  first.enqueue("a gate", [&] { go.wait(false); });
  event.record(early);  // beyond the gate: a wait that moved with it would never end
  int seen = 0;
  second.enqueue("read", [&] { seen = value; });
  second.drain();
  EXPECT_EQ(seen, 1);
  EXPECT_FALSE(event.query()) << "the event itself is its last record";
  go = true;
  go.notify_all();
  backend().synchronizeDevice(0);
}

TEST_F(SimStream, ARecordOnAnotherStreamDoesNotEndAWaitEarly) {
  auto& slow = Device::at(0).stream(1);
  std::atomic<bool> go = false, passed = false;
  const c10::Stream early(c10::Stream::UNSAFE, device(0), 1), late(c10::Stream::UNSAFE, device(0), 2);
  c10::Event event(c10::kPrivateUse1);
  slow.enqueue("a gate", [&] { go.wait(false); });
  event.record(early);
  event.block(late);
  Device::at(0).stream(2).enqueue("pass", [&] { passed = true; });
  event.record(current());  // which is idle: reached at once
  EXPECT_TRUE(event.query());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(passed);
  go = true;
  go.notify_all();
  backend().synchronizeDevice(0);
  EXPECT_TRUE(passed);
}

TEST_F(SimStream, PrioritiesAreStreamsOfTheirOwn) {
  const auto low = side_stream(0), high = side_stream(0, /*high_priority=*/true);
  EXPECT_NE(low, high);
  EXPECT_TRUE(Device::at(0).stream(high.id()).high_priority());
  EXPECT_FALSE(Device::at(0).stream(low.id()).high_priority());
}

TEST_F(SimStream, ThreadsHaveCurrentDevicesAndStreamsOfTheirOwn) {
  const c10::StreamGuard on(side_stream());
  const c10::DeviceGuard here(device(2));
  std::thread([] {
    EXPECT_EQ(current_device(), 0);
    EXPECT_EQ(current().id(), 0);
  }).join();
  EXPECT_EQ(current_device(), 2);
}

TEST_F(SimStream, TimeBetweenEvents) {
  c10::Event before(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event after(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  before.record(current());
  Device::at(0).stream(0).enqueue("sleep", [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  after.record(current());
  after.synchronize();
  EXPECT_GE(before.elapsedTime(after), 5.0);
}

TEST_F(SimStream, WhatIsNoDeviceOrStreamIsSaid) {
  EXPECT_THROW(Device::at(device_count), InvalidArgument);
  EXPECT_THROW(Device::at(0).stream(1000), InvalidArgument);
  EXPECT_THROW(at::zeros({1}, on_device(device_count)), c10::Error);
}

}  // namespace tesserae::sim
