#include <gtest/gtest.h>

#include "tests/comm/group_cases.h"
#include "tests/support/ranks.h"

namespace tesserae::comm {

namespace {

using tesserae::testing::run_ranks;

std::shared_ptr<Fabric> connect(std::chrono::milliseconds deadline) {
  FabricOptions options;
  options.backend = "gloo";
  options.deadline = deadline;
  return Fabric::connect(mesh::World::from_environment(), options);
}

}  // namespace

// One launch for all cases: starting ranks costs more than most of them.
RANK_MAIN(whole_suite) {
  const auto fabric = connect(std::chrono::minutes(2));
  EXPECT_EQ(fabric->world().hosts(), 1);
  for (const auto& test : group_cases()) {
    SCOPED_TRACE(test.name);
    test.run(*fabric);
  }
}

RANK_MAIN(different_verbs) {
  members_that_call_different_verbs_get_mismatch(*connect(std::chrono::minutes(2)));
}

RANK_MAIN(different_sizes) {
  members_that_bring_different_sizes_get_mismatch(*connect(std::chrono::minutes(2)));
}

RANK_MAIN(never_calls) {
  a_member_that_never_calls_makes_the_others_time_out(*connect(std::chrono::seconds(3)), std::chrono::seconds(12));
}

class GlooSuite : public ::testing::TestWithParam<int> {};

TEST_P(GlooSuite, Behaves) {
  const auto results = run_ranks("whole_suite", GetParam(), {}, std::chrono::seconds(200));
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

INSTANTIATE_TEST_SUITE_P(Gloo, GlooSuite, ::testing::Values(2, 3, 4));

TEST(Gloo, DifferentVerbs) {
  const auto results = run_ranks("different_verbs", 3);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Gloo, DifferentSizes) {
  const auto results = run_ranks("different_sizes", 3);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Gloo, AMemberThatNeverCalls) {
  const auto results = run_ranks("never_calls", 3);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

}  // namespace tesserae::comm
