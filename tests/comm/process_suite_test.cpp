// The behavioural suite over the backends whose ranks are processes.
#include <gtest/gtest.h>

#include "tests/comm/group_cases.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {

namespace {

using tesserae::testing::run_ranks;

// "two_levels": shared memory, and hosts of two ranks (with three ranks: two and one, which is flat).
constexpr int ranks_a_host = 2;

std::shared_ptr<Fabric> connect(const std::string& backend, std::chrono::milliseconds deadline) {
  FabricOptions options;
  options.backend = backend == "two_levels" ? "shm" : backend;
  const auto world = mesh::World::from_environment();
  if (backend == "two_levels") options.host = std::to_string(world.rank() / ranks_a_host);
  options.deadline = deadline;
  return Fabric::connect(world, options);
}

}  // namespace

// One launch for all cases: starting ranks costs more than most of them. args: the backend.
RANK_MAIN(whole_suite) {
  const auto fabric = connect(args[0], std::chrono::minutes(2));
  EXPECT_EQ(fabric->world().hosts(), args[0] == "two_levels" ? (fabric->size() + 1) / ranks_a_host : 1);
  // Their case looks at nothing where there is none.
  EXPECT_EQ(fabric->everyone().share(1).defined(), args[0] != "gloo" && fabric->world().hosts() == 1);
  for (const auto& test : group_cases()) {
    SCOPED_TRACE(test.name);
    test.run(*fabric);
  }
}

RANK_MAIN(different_verbs) {
  members_that_call_different_verbs_get_mismatch(*connect(args[0], std::chrono::minutes(2)));
}

RANK_MAIN(different_sizes) {
  members_that_bring_different_sizes_get_mismatch(*connect(args[0], std::chrono::minutes(2)));
}

RANK_MAIN(different_contents) {
  members_that_mean_different_contents_get_mismatch(*connect(args[0], std::chrono::minutes(2)));
}

RANK_MAIN(different_packed_verbs) {
  members_that_call_different_packed_verbs_get_mismatch(*connect(args[0], std::chrono::minutes(2)));
}

RANK_MAIN(never_calls) {
  a_member_that_never_calls_makes_the_others_time_out(*connect(args[0], std::chrono::seconds(3)),
                                                      std::chrono::seconds(12));
}

// The order of those that reduce gradients where the ranks of a host share the parameters.
RANK_MAIN(alternates_between_hosts) {
  const auto fabric = connect("two_levels", std::chrono::minutes(2));
  Group& group = fabric->group({0, 2, 1, 3}, Traffic::reduce);
  const tesserae::testing::Counting counting;
  using tesserae::testing::CountingAllocator;
  const at::Tensor buffer = at::ones({1 << 20});
  group.reduce_scatter(buffer);
  const int64_t before = CountingAllocator::alive, piece = static_cast<int64_t>(buffer.nbytes()) / 4;
  CountingAllocator::peak = before;
  group.reduce_scatter(buffer);
  EXPECT_LE(CountingAllocator::peak - before, piece + (1 << 16)) << "what the counterpart sends, and no copy";
  CountingAllocator::peak = before;
  group.all_gather(buffer);
  EXPECT_LE(CountingAllocator::peak - before, 1 << 16);
}

TEST(TwoLevels, CopyNothingOfMembersThatAlternateBetweenHosts) {
  const auto results = run_ranks("alternates_between_hosts", 4);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

class ProcessSuite : public ::testing::TestWithParam<std::string> {
 protected:
  /// For what goes wrong: two levels need hosts of as many ranks.
  static int ranks() { return GetParam() == "two_levels" ? 4 : 3; }
  void expect_success(const std::string& main, int ranks) {
    const auto results = run_ranks(main, ranks, {GetParam()}, std::chrono::seconds(200));
    EXPECT_TRUE(results.all_succeeded()) << results.text();
  }
};

TEST_P(ProcessSuite, TwoRanksBehave) {
  expect_success("whole_suite", 2);
}

TEST_P(ProcessSuite, ThreeRanksBehave) {
  expect_success("whole_suite", 3);
}

TEST_P(ProcessSuite, FourRanksBehave) {
  expect_success("whole_suite", 4);
}

TEST_P(ProcessSuite, SixRanksBehave) {
  expect_success("whole_suite", 6);
}

TEST_P(ProcessSuite, DifferentVerbs) {
  expect_success("different_verbs", ranks());
}

TEST_P(ProcessSuite, DifferentSizes) {
  expect_success("different_sizes", ranks());
}

TEST_P(ProcessSuite, DifferentContents) {
  expect_success("different_contents", ranks());
}

TEST_P(ProcessSuite, DifferentPackedVerbs) {
  expect_success("different_packed_verbs", ranks());
}

TEST_P(ProcessSuite, AMemberThatNeverCalls) {
  expect_success("never_calls", ranks());
}

INSTANTIATE_TEST_SUITE_P(Backend, ProcessSuite, ::testing::Values("gloo", "shm", "two_levels"),
                         [](const auto& info) { return info.param; });

}  // namespace tesserae::comm
