#include "tesserae/comm/call_log.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {
namespace {

using std::chrono::milliseconds;

TEST(Waiting, OneWithinAnotherCountsOnce) {
  const double before = waited_by_this_thread();
  {
    const Waiting outer;
    EXPECT_TRUE(*waiting_of_this_thread());
    const Waiting inner;
    os::sleep_for(milliseconds(20));
  }
  EXPECT_FALSE(*waiting_of_this_thread());
  const double waited = waited_by_this_thread() - before;
  EXPECT_GE(waited, 0.020);
  EXPECT_LT(waited, 0.039);
}

TEST(Waiting, IsOfTheThreadThatWaitsInAVerbOrForATicket) {
  run_local(2, [](Fabric& fabric) {
    const double before = waited_by_this_thread();
    if (fabric.rank() == 1) os::sleep_for(milliseconds(100));
    fabric.everyone().barrier();
    const double in_verb = waited_by_this_thread() - before;
    const Ticket ticket = fabric.lane(Traffic::gather).submit([] { os::sleep_for(milliseconds(50)); });
    ticket.wait();
    const double for_ticket = waited_by_this_thread() - before - in_verb;
    if (fabric.rank() == 0) {
      EXPECT_GE(in_verb, 0.05);
    } else {
      EXPECT_LT(in_verb, 0.1) << "the last to come hardly waits";
    }
    EXPECT_GE(for_ticket, 0.04);
    std::thread([] { EXPECT_EQ(waited_by_this_thread(), 0); }).join();
  });
}

TEST(CallLog, TellsWhichVerbsALaneHasCarriedForWhom) {
  run_local(2, [](Fabric& fabric) {
    const auto log = std::make_shared<CallLog>(2);
    Group& group = fabric.group({0, 1}, Traffic::reduce);
    Lane& lane = fabric.lane(Traffic::reduce);
    const auto reduce = [&](const char* unit) {
      lane.submit([&group, unit] { group.all_reduce(at::ones({4}), {.unit = unit}); }).wait();
    };
    reduce("before");
    lane.log_calls(log);
    for (const char* unit : {"a", "b", "c"}) reduce(unit);
    const std::vector<Call> calls = log->take();
    ASSERT_EQ(calls.size(), 2U) << "the newest";
    EXPECT_EQ(calls[0].unit, "b");
    EXPECT_EQ(calls[1].unit, "c");
    EXPECT_EQ(calls[1].verb, "all_reduce");
    EXPECT_EQ(calls[1].bytes, group.counters().all_reduce.bytes / 4);
    EXPECT_LE(calls[0].end, calls[1].begin);
    EXPECT_LT(calls[1].begin, calls[1].end);
    EXPECT_TRUE(log->take().empty());
    group.all_reduce(at::ones({4}));
    EXPECT_TRUE(log->take().empty()) << "not on the lane";
    lane.log_calls(nullptr);
    reduce("after");
    EXPECT_TRUE(log->take().empty());
  });
}

}  // namespace
}  // namespace tesserae::comm
