#include "tesserae/comm/lane.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tesserae::comm {

namespace {

std::unique_ptr<Lane> make_lane(Lane::Kind kind) {
  return std::make_unique<Lane>("test", kind, c10::kCPU);
}

}  // namespace

class AnyLane : public ::testing::TestWithParam<Lane::Kind> {};
INSTANTIATE_TEST_SUITE_P(Host, AnyLane, ::testing::Values(Lane::Kind::threaded, Lane::Kind::immediate));

TEST_P(AnyLane, RunsTasksInOrder) {
  const auto lane = make_lane(GetParam());
  std::vector<int> order;
  Ticket last;
  for (int i = 0; i < 100; ++i) last = lane->submit([&order, i] { order.push_back(i); });
  last.wait();
  EXPECT_TRUE(last.ready());
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST_P(AnyLane, AFailureStaysAndLaterTasksDoNotRun) {
  const auto lane = make_lane(GetParam());
  bool ran = false;
  const auto before = lane->submit([] {});
  const auto failed = lane->submit([] { throw std::runtime_error("first"); });
  const auto after = lane->submit([&] { ran = true; });
  before.wait();
  EXPECT_THROW(failed.wait(), std::runtime_error);
  EXPECT_THROW(failed.wait(), std::runtime_error) << "every time it is called";
  EXPECT_THROW(after.wait(), std::runtime_error);
  EXPECT_FALSE(ran);
  lane->drain();
}

TEST_P(AnyLane, EndsAfterWhatWasSubmitted) {
  std::atomic<int> runs = 0;
  auto lane = make_lane(GetParam());
  for (int i = 0; i < 50; ++i) lane->submit([&] { ++runs; });
  lane.reset();
  EXPECT_EQ(runs, 50);
}

TEST(ThreadedLane, TakesTasksFromSeveralThreads) {
  const auto lane = make_lane(Lane::Kind::threaded);
  int runs = 0;  // no atomic: one thread runs all tasks
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) lane->submit([&] { ++runs; });
    });
  }
  for (auto& thread : threads) thread.join();
  lane->drain();
  EXPECT_EQ(runs, 400);
}

TEST(ThreadedLane, DoesNotBlockTheCaller) {
  const auto lane = make_lane(Lane::Kind::threaded);
  std::latch go(1);
  const auto ticket = lane->submit([&] { go.wait(); });
  EXPECT_FALSE(ticket.ready());
  go.count_down();
  ticket.wait();
  EXPECT_TRUE(ticket.ready());
}

TEST(ThreadedLane, LeavesTheCallersThreadsAlone) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const auto lane = make_lane(Lane::Kind::threaded);
  int inside = 0;
  lane->submit([&] { inside = at::get_num_threads(); }).wait();
  EXPECT_EQ(inside, 1);
  EXPECT_EQ(at::get_num_threads(), 2);
  int elsewhere = 0;
  std::thread([&] { elsewhere = at::get_num_threads(); }).join();
  EXPECT_EQ(elsewhere, 2);
  at::set_num_threads(before);
}

TEST(Ticket, OfNothingIsDone) {
  const Ticket ticket;
  EXPECT_TRUE(ticket.ready());
  ticket.wait();
}

}  // namespace tesserae::comm
