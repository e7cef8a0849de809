// Lanes that are streams (comm/lane.h).

#include "tesserae/comm/lane.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <stdexcept>
#include <thread>

#include "tesserae/shard/exposed_time.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

class SimLane : public Sim {};

at::Tensor fives() {
  return at::full({1000}, 5.0f);
}

}  // namespace

TEST_F(SimLane, ATaskComesAfterWhatTheCallerQueued) {
  EXPECT_EQ(right([] {
              comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
              const at::Tensor data = at::zeros({1000}, on_device());
              for (int i = 0; i < 5; ++i) data.add_(1);
              at::Tensor copy;
              const comm::Ticket ticket = lane.submit([&] { copy = data.clone(); });
              ticket.wait();
              data.fill_(7);  // after the task, which reads
              return at::equal(copy.cpu(), fives());
            }),
            seeds);
}

TEST_F(SimLane, WithoutWaitingForTheTicketSomeSeedReadsTooEarly) {
  EXPECT_LT(right([] {
              comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
              const at::Tensor data = at::zeros({1000}, on_device());
              lane.submit([&] {
                for (int i = 0; i < 5; ++i) data.add_(1);
              });
              return at::equal(data.cpu(), fives());
            }),
            seeds);
}

TEST_F(SimLane, TheHostDoesNotWait) {
  comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
  const at::Tensor data = at::zeros({1000}, on_device());
  std::atomic<bool> go = false;
  Device::at(0).stream(0).enqueue("a gate", [&] { go.wait(false); });
  const Counters before = counters(0);
  const comm::Ticket ticket = lane.submit([&] { data.add_(5); });
  EXPECT_TRUE(ticket.ready());
  ticket.wait();
  EXPECT_EQ((counters(0) - before).synchronizations, 0);
  go = true;
  go.notify_all();
  EXPECT_TRUE(at::equal(data.cpu(), fives()));
}

// What only the task holds is memory that the caller's stream made: it must not be given to the next who asks there
// before the lane has read it.
TEST_F(SimLane, WhatATaskCapturedLivesUntilItHasRun) {
  EXPECT_EQ(right([] {
              comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
              const at::Tensor sum = at::zeros({1000}, on_device());
              comm::Ticket last;
              for (int i = 0; i < 5; ++i) {
                at::Tensor part = at::full({1000}, 1.0f, on_device());
                last = lane.submit([sum, part = std::move(part)] { sum.add_(part); });
                const at::Tensor next = at::full({1000}, 100.0f, on_device());
              }
              last.wait();
              return at::equal(sum.cpu(), fives());
            }),
            seeds);
}

// The host is ahead of the device by as much as it likes, and memory must not follow: the stream that has waited for a
// task uses its memory again only behind it.
TEST_F(SimLane, WhatATaskCapturedIsLetGoOfByTheStreamThatHasWaited) {
  comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
  const at::Tensor sum = at::zeros({1 << 18}, on_device());
  std::atomic<bool> go = false;
  Device::at(0).stream(0).enqueue("a gate", [&] { go.wait(false); });
  const size_t before = Device::at(0).memory().used_bytes();
  for (int i = 0; i < 50; ++i) {
    at::Tensor part = at::full({1 << 18}, 1.0f, on_device());
    comm::Ticket ticket = lane.submit([sum, part = std::move(part)] { sum.add_(part); });
    ticket.wait();
  }
  EXPECT_LT(Device::at(0).memory().used_bytes(), before + (5 << 20));
  go = true;
  go.notify_all();
  EXPECT_TRUE(at::equal(sum.cpu(), at::full({1 << 18}, 50.0f)));
}

// The host waits for the device, so what only the tasks held may be given to others, and memory of the host be read.
TEST_F(SimLane, DrainingWaitsForTheDevice) {
  EXPECT_EQ(right([] {
              comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
              const auto pinned = at::TensorOptions().dtype(at::kFloat).pinned_memory(true);
              const at::Tensor data = at::zeros({1000}, on_device()), host = at::empty({1000}, pinned);
              for (int i = 0; i < 5; ++i) lane.submit([data] { data.add_(1); });
              lane.submit([data, host] { host.copy_(data, /*non_blocking=*/true); });
              lane.drain();
              return at::equal(host, fives());
            }),
            seeds);
}

TEST_F(SimLane, HowLongTheStreamStoodStillIsKnownLater) {
  restart({.longest_delay = std::chrono::microseconds(0)});
  comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
  shard::ExposedTime exposed;
  const auto pause = [] {
    Device::at(0).current_stream().enqueue("a pause",
                                           [] { std::this_thread::sleep_for(std::chrono::milliseconds(60)); });
  };
  const Counters before = counters(0);
  exposed.wait(lane.submit(pause));
  EXPECT_EQ(exposed.seconds(), 0) << "it stands still";
  EXPECT_EQ((counters(0) - before).synchronizations, 0);
  Device::at(0).synchronize();
  const double first = exposed.seconds();
  EXPECT_GE(first, 0.055);
  EXPECT_LT(first, 6);
  const comm::Ticket over = lane.submit(pause);
  lane.drain();
  exposed.wait(over);
  exposed.wait({});
  Device::at(0).synchronize();
  EXPECT_LT(exposed.seconds() - first, 0.05) << "nobody had to wait";
}

TEST_F(SimLane, AFailureStays) {
  comm::Lane lane("test", comm::Lane::Kind::stream, device(0));
  bool ran = false;
  const auto failed = lane.submit([] { throw std::runtime_error("first"); });
  const auto after = lane.submit([&] { ran = true; });
  EXPECT_THROW(failed.wait(), std::runtime_error);
  EXPECT_THROW(failed.wait(), std::runtime_error) << "every time it is called";
  EXPECT_THROW(after.wait(), std::runtime_error);
  EXPECT_FALSE(ran);
  lane.drain();
}

}  // namespace tesserae::sim
