#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "tests/comm/group_cases.h"

namespace tesserae::comm {

class LocalSuite : public ::testing::TestWithParam<std::tuple<int, GroupCase>> {};

TEST_P(LocalSuite, Behaves) {
  const auto& [ranks, test] = GetParam();
  run_local(ranks, test.run, std::chrono::minutes(2));
}

INSTANTIATE_TEST_SUITE_P(Local, LocalSuite,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::ValuesIn(group_cases())),
                         [](const auto& info) {
                           return std::get<1>(info.param).name + "_" + std::to_string(std::get<0>(info.param));
                         });

TEST(Local, DifferentVerbs) {
  run_local(3, members_that_call_different_verbs_get_mismatch, std::chrono::minutes(1));
}

TEST(Local, DifferentSizes) {
  run_local(3, members_that_bring_different_sizes_get_mismatch, std::chrono::minutes(1));
}

TEST(Local, DifferentContents) {
  run_local(3, members_that_mean_different_contents_get_mismatch, std::chrono::minutes(1));
}

TEST(Local, DifferentPackedVerbs) {
  run_local(3, members_that_call_different_packed_verbs_get_mismatch, std::chrono::minutes(1));
}

TEST(Local, DifferentMessages) {
  EXPECT_THROW(run_local(2,
                         [](Fabric& fabric) {
                           auto& group = fabric.everyone();
                           const auto data = at::zeros({fabric.rank() == 0 ? 4 : 5});
                           if (fabric.rank() == 0) group.exchange({{1, data}}, {});
                           if (fabric.rank() == 1) group.exchange({}, {{0, data}});
                         }),
               Mismatch);
}

TEST(Local, AMemberThatNeverCalls) {
  run_local(
      3,
      [](Fabric& fabric) {
        a_member_that_never_calls_makes_the_others_time_out(fabric, std::chrono::milliseconds(3000));
      },
      std::chrono::milliseconds(300));
}

TEST(Local, ARankThatThrowsIsLostToItsPeers) {
  std::atomic<int> told = 0;
  const auto body = [&](Fabric& fabric) {
    if (fabric.rank() == 1) throw std::runtime_error("out of memory");
    try {
      fabric.everyone().barrier();
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks.front(), 1);
      ++told;
      throw;
    }
  };
  try {
    run_local(4, body);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& failure) {
    EXPECT_STREQ(failure.what(), "out of memory") << "the cause comes before its consequences";
  }
  EXPECT_EQ(told, 3);
}

TEST(Local, ARankThatThrowsEndsWhatItsPeersLanesWaitFor) {
  EXPECT_THROW(run_local(2,
                         [](Fabric& fabric) {
                           auto& group = fabric.group({0, 1}, Traffic::gather);
                           if (fabric.rank() == 1) throw std::logic_error("wrong");
                           fabric.lane(Traffic::gather).submit([&] { group.barrier(); });
                         }),
               std::logic_error);
}

TEST(Local, NumbersWorldsOfOneHost) {
  run_local(3, [](Fabric& fabric) {
    EXPECT_EQ(fabric.size(), 3);
    EXPECT_EQ(fabric.world().hosts(), 1);
    EXPECT_TRUE(fabric.everyone().blocks_host());
    EXPECT_EQ(fabric.everyone().rank(), fabric.rank());
  });
}

}  // namespace tesserae::comm
