// The behavioural suite of groups for ranks that are processes and share one device (comm/transports/staged_group.h).

#include <gtest/gtest.h>

#include "tests/comm/group_cases.h"
#include "tests/device/device.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {
namespace {

using tesserae::testing::run_ranks;

std::shared_ptr<Fabric> connect_staged(std::chrono::milliseconds deadline) {
  FabricOptions options;
  options.backend = "staged";
  options.device = tesserae::testing::test_device();
  options.deadline = deadline;
  return Fabric::connect(mesh::World::from_environment(), options);
}

void expect_success(const std::string& main, int ranks) {
  const auto results = run_ranks(main, ranks, {}, std::chrono::seconds(200));
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace

RANK_MAIN(staged_suite) {
  const auto fabric = connect_staged(std::chrono::minutes(2));
  EXPECT_EQ(fabric->lane(Traffic::gather).kind(), Lane::Kind::stream);
  EXPECT_FALSE(fabric->everyone().blocks_host());
  EXPECT_TRUE(fabric->everyone().share(1).defined());
  for (const auto& test : group_cases()) {
    if (test.name == "lanes_run_beside_each_other") continue;  // these wait for the host: see StagedGroup
    SCOPED_TRACE(test.name);
    test.run(*fabric);
  }
}

RANK_MAIN(staged_different_verbs) {
  members_that_call_different_verbs_get_mismatch(*connect_staged(std::chrono::minutes(2)));
}

RANK_MAIN(staged_different_sizes) {
  members_that_bring_different_sizes_get_mismatch(*connect_staged(std::chrono::minutes(2)));
}

RANK_MAIN(staged_never_calls) {
  a_member_that_never_calls_makes_the_others_time_out(*connect_staged(std::chrono::seconds(3)),
                                                      std::chrono::seconds(12));
}

TEST(StagedGroup, TwoRanksBehave) {
  expect_success("staged_suite", 2);
}

TEST(StagedGroup, ThreeRanksBehave) {
  expect_success("staged_suite", 3);
}

TEST(StagedGroup, DifferentVerbs) {
  expect_success("staged_different_verbs", 3);
}

TEST(StagedGroup, DifferentSizes) {
  expect_success("staged_different_sizes", 3);
}

TEST(StagedGroup, AMemberThatNeverCalls) {
  expect_success("staged_never_calls", 3);
}

TEST(StagedGroup, TensorsOfTheCpuAreRefused) {
  FabricOptions options;
  options.backend = "staged";
  EXPECT_THROW(Fabric::connect(mesh::World::from_environment(), options), InvalidArgument);
}

}  // namespace tesserae::comm
