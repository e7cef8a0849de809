#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "tesserae/os/process.h"

namespace tesserae::testing {

/// Tests with real ranks. A test program that links tesserae::test_support (which brings main()) names what a rank
/// does:
///
///   RANK_MAIN(adds_up) {                       // args: what run_ranks passed on
///     auto fabric = comm::Fabric::connect(mesh::World::from_environment());
///     EXPECT_EQ(...);                          // a failed expectation ends the rank with its text and code 1
///   }
///   TEST(Ranks, AddUp) { EXPECT_TRUE(run_ranks("adds_up", 4).all_succeeded()); }
///
/// Each rank has the variables that torchrun sets, a free port and one thread. It is a copy of this process, or, where
/// that cannot be (it has threads, or the job has an environment of its own), this same program again.

using RankArgs = std::vector<std::string>;

struct RankResult {
  os::Exit exit;
  std::string output;                          ///< standard output and standard error, mixed
  bool out_of_time = false;                    ///< it was killed because it still ran at the deadline
  double value(const std::string& key) const;  ///< x of the last line "key=x"; throws if there is none
};

struct RankResults {
  std::vector<RankResult> ranks;

  /// Use as EXPECT_TRUE(results.all_succeeded()) << results.text().
  bool all_succeeded() const;
  std::string text() const;  ///< how each rank ended and what it wrote
  const RankResult& operator[](int rank) const { return ranks.at(static_cast<size_t>(rank)); }
};

struct RankJob {
  std::string main;  ///< the name given to RANK_MAIN
  int ranks = 2;
  RankArgs args;
  std::chrono::seconds deadline{120};
  std::map<std::string, std::string> environment = {};  ///< for all ranks
  bool own_memory = false;            ///< measured: what a copy has in common with the test is not there
  std::vector<int> left_behind = {};  ///< ranks that never end by themselves: killed once the others ended
};

/// Starts the ranks and waits for their ends; kills all that still run at the deadline. None outlives this process.
RankResults run_ranks(const RankJob& job);
/// Several jobs at a time, in their order: for those that mostly wait, as for a deadline.
std::vector<RankResults> run_side_by_side(const std::vector<RankJob>& jobs);
RankResults run_ranks(const std::string& main, int ranks, const RankArgs& args = {},
                      std::chrono::seconds deadline = std::chrono::seconds(120));

/// Inside a rank: hands a value to the test, which reads it with RankResult::value.
void report(const std::string& key, double value);

bool register_rank_main(const char* name, void (*main)(const RankArgs&));

#define RANK_MAIN(name)                                                                                   \
  static void rank_main_##name(const ::tesserae::testing::RankArgs& args);                                \
  static const bool registered_##name = ::tesserae::testing::register_rank_main(#name, rank_main_##name); \
  static void rank_main_##name([[maybe_unused]] const ::tesserae::testing::RankArgs& args)

}  // namespace tesserae::testing
