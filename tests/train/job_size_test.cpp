#include "tesserae/train/job_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Degrees = mesh::Degrees;

/// Of 4 ranks with 6 samples each, in two micro-batches.
config::Config written(const config::Json& more = {}) {
  config::Json given = {{"run", {{"folder", "runs/sizes"}, {"device", "cpu"}}},
                        {"data", {{"path", "text.txt"}}},
                        {"train", {{"batch_per_rank", 3}, {"accumulate", 2}, {"eval_batches", 2}}}};
  if (!more.is_null()) given.merge_patch(more);
  const std::string file = testing::TempDir() + "/tesserae-job-size-" + std::to_string(::getpid()) + ".json";
  os::files().write(file, given.dump());
  return config::load_config(file);
}

TEST(JobSize, AStepKeepsItsSamplesAndMicroBatchesDoNotGrow) {
  for (const int ranks : {1, 2, 3, 4, 6, 8, 12, 24}) {
    const config::Config sized = for_ranks(written(), 4, ranks);
    EXPECT_EQ(sized.train.batch_per_rank * sized.train.accumulate * ranks, 24) << ranks;
    EXPECT_LE(sized.train.batch_per_rank, 3) << ranks;
    EXPECT_GE(sized.train.eval_batches * sized.train.batch_per_rank * ranks, 24) << ranks;
  }
  EXPECT_EQ(for_ranks(written(), 4, 2).train.accumulate, 4);
  EXPECT_EQ(for_ranks(written(), 4, 2).train.eval_batches, 4);
}

TEST(JobSize, DegreesBecomeTheNearestThatThereAre) {
  EXPECT_EQ(nearest_degrees({4, 4, 4}, 2), (Degrees{2, 2, 2}));
  EXPECT_EQ(nearest_degrees({4, 4, 4}, 3), (Degrees{3, 3, 3}));
  EXPECT_EQ(nearest_degrees({1, 2, 4}, 8), (Degrees{1, 2, 4}));
  EXPECT_EQ(nearest_degrees({1, 1, 4}, 2), (Degrees{1, 1, 2}));
  EXPECT_EQ(config::strategy_of(for_ranks(written(), 4, 8), 8).degrees, (Degrees{8, 8, 8})) << "FULL_SHARD";
  const config::Config two =
      for_ranks(written({{"sharding", {{"strategy", "HYBRID_SHARD_ZERO2"}}}, {"hybrid_shard_degree", 4}}), 4, 2);
  EXPECT_EQ(config::strategy_of(two, 2).degrees, (Degrees{2, 2, 2}));
  EXPECT_FALSE(config::strategy_of(two, 2).free_after_forward) << "lifetimes stay";
}

TEST(JobSize, WhatCannotBeIsRefusedWithTheNearestThatCan) {
  EXPECT_EQ(why_not(written(), 4, 6), "");
  EXPECT_THAT(why_not(written(), 4, 5),
              AllOf(HasSubstr("the 24 samples of a step are no multiple of 5 ranks"), HasSubstr("possible: 4 and 6")));
  EXPECT_THAT(why_not(written(), 4, 0), HasSubstr("nearest possible: 1"));
  EXPECT_THAT(why_not(written(), 4, 1000), HasSubstr("nearest possible: 24"));
  EXPECT_THAT(why_not(written({{"tensor_parallel_degree", 2}, {"context_parallel_degree", 2}}), 4, 2),
              AllOf(HasSubstr("a multiple of 4 ranks, not 2"), HasSubstr("nearest possible: 4")));
  EXPECT_THROW(for_ranks(written(), 4, 5), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::train
