#include "tesserae/comm/call_log.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/link_log.h"
#include "tests/support/ranks.h"

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
    const auto [calls, sent] = log->take();
    ASSERT_EQ(calls.size(), 2U) << "the newest";
    EXPECT_EQ(calls[0].unit, "b");
    EXPECT_EQ(calls[1].unit, "c");
    EXPECT_EQ(calls[1].verb, "all_reduce");
    EXPECT_EQ(calls[1].bytes, group.counters().all_reduce.bytes / 4);
    EXPECT_EQ(sent.at("all_reduce"), 3 * calls[1].bytes) << "also by the one that is no more";
    EXPECT_LE(calls[0].end, calls[1].begin);
    EXPECT_LT(calls[1].begin, calls[1].end);
    EXPECT_TRUE(log->take().calls.empty());
    group.all_reduce(at::ones({4}));
    EXPECT_TRUE(log->take().calls.empty()) << "not on the lane";
    lane.log_calls(nullptr);
    reduce("after");
    EXPECT_TRUE(log->take().calls.empty());
  });
}

TEST(LinkLog, TellsWhatWentOverWhichLinkInWhichHop) {
  LinkLog::of_process().take();
  run_local(2, [](Fabric& fabric) {
    Group& group = fabric.group({0, 1}, Traffic::reduce);
    for (int i = 0; i < 3; ++i) group.all_reduce(at::ones({4}));
    group.barrier();  // no bytes
    group.broadcast(at::ones({8}), 0);
  });
  const std::vector<LinkUse> uses = LinkLog::of_process().take();
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_TRUE(uses[0].same_hop({.link = "threads", .lane = "reduce", .verb = "all_reduce", .ranks = 2}));
  EXPECT_EQ(uses[0].calls, 6U) << "of both ranks";
  EXPECT_EQ(uses[0].bytes, 6 * 16U);
  EXPECT_GT(uses[0].seconds, 0);
  EXPECT_GE(uses[0].quickest * uses[0].seconds, 95.9) << "no slower than all together";
  EXPECT_EQ(uses[1].verb, "broadcast");
  EXPECT_EQ(uses[1].calls, 1U) << "of the root, which sends";
  EXPECT_TRUE(LinkLog::of_process().take().empty());
}

// Two hosts of two: what crosses and what stays are two links, and the lane's log has the verb once.
RANK_MAIN(gathers_on_two_levels) {
  const auto world = mesh::World::from_environment();
  FabricOptions options;
  options.backend = "shm";
  options.host = std::to_string(world.rank() / 2);
  const auto fabric = Fabric::connect(world, options);
  Group& group = fabric->group({0, 1, 2, 3}, Traffic::gather);
  Lane& lane = fabric->lane(Traffic::gather);
  const auto log = std::make_shared<CallLog>();
  lane.log_calls(log);
  LinkLog::of_process().take();
  constexpr uint64_t piece = 1 << 18, most_words = 4096;  // bytes; what members tell each other of a verb
  lane.submit([&group] { group.all_gather(at::ones({1 << 18})); }).wait();
  const auto [calls, sent] = log->take();
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0].bytes, 3 * piece);
  std::map<std::string, LinkUse> by_link;
  for (const LinkUse& use : LinkLog::of_process().take()) by_link[use.link] = use;
  ASSERT_EQ(by_link.size(), 2U);
  EXPECT_EQ(by_link["tcp"].verb, "exchange");
  EXPECT_EQ(by_link["tcp"].ranks, 4);
  EXPECT_EQ(by_link["shared memory"].verb, "all_gather");
  EXPECT_EQ(by_link["shared memory"].ranks, 2);
  EXPECT_EQ(by_link["shared memory"].lane, "gather");
  EXPECT_GE(by_link["tcp"].bytes, piece) << "to the counterpart on the other host";
  EXPECT_LE(by_link["tcp"].bytes, piece + most_words);
  EXPECT_GE(by_link["shared memory"].bytes, 2 * piece) << "its own, and what it was sent";
  EXPECT_LE(by_link["shared memory"].bytes, 2 * piece + most_words);
  lane.log_calls(nullptr);
}

TEST(LinkLog, TellsWhatCrossesBetweenHostsFromWhatStays) {
  const auto results = tesserae::testing::run_ranks("gathers_on_two_levels", 4);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace
}  // namespace tesserae::comm
