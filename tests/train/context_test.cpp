#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/mesh_job.h"

// `tesserae train` with context-parallel ranks: the numbers of a run do not depend on how sequences are cut.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ContextJob : public MeshJob {
 protected:
  ContextJob() : MeshJob("context", {"train.sample_tokens=8"}) {}
};

TEST_F(ContextJob, CutSequencesGiveTheSameLosses) {
  const std::string saves = "checkpoint.every_steps=12";
  job_.run("whole", ranks(2, {"hybrid_shard_degree=2", saves, "checkpoint.keep=0"}));
  const std::string screen = job_.run("cut", ranks(4, {"context_parallel_degree=2", "hybrid_shard_degree=4"}));
  expect_same_losses("cut", "whole");
  EXPECT_THAT(screen,
              AllOf(HasSubstr("on 4 ranks"), HasSubstr("sequences cut over 2, P=4 G=4 O=4"), HasSubstr("A sample:")));
  const config::Json summary = job_.summary("cut");
  EXPECT_EQ(summary["context_parallel_degree"], 2);
  EXPECT_EQ(summary["layout"], (config::Json{{"N", 4}, {"P", 4}, {"G", 4}, {"O", 4}}));
  EXPECT_EQ(summary["tokens"], job_.summary("whole")["tokens"]);

  // With split layers, from a checkpoint of another mesh, while the dial turns; and back on fewer ranks.
  expect_continues(
      "both", "whole", 4,
      {"context_parallel_degree=2", "tensor_parallel_degree=2", "train.batch_per_rank=4",
       R"(dial.schedule=[{"step": 15, "hybrid_shard_degree": 1}, {"step": 18, "hybrid_shard_degree": 2}])"});
  job_.run("born-cut", ranks(4, {"context_parallel_degree=4", "train.batch_per_rank=4", saves, "checkpoint.keep=0",
                                 "context_parallel_method=p2p"}));
  expect_same_losses("born-cut", "whole");
  expect_continues("joined", "born-cut", 2, {"sharding.strategy=ZERO_1"});
}

TEST_F(ContextJob, DegreesThatDoNotDivideNameWhatWould) {
  EXPECT_THAT(
      refused(4, {"context_parallel_degree=3"}),
      HasSubstr("context_parallel_degree: a context-parallel degree of 3 does not divide the 4 ranks of the job"));
  EXPECT_THAT(refused(4, {"tensor_parallel_degree=2", "context_parallel_degree=4"}),
              HasSubstr("context_parallel_degree: a context-parallel degree of 4 does not divide the 2 ranks"));
  EXPECT_THAT(refused(4, {"context_parallel_degree=4", "model.kv_heads=2", "context_parallel_method=all_to_all"}),
              HasSubstr("context_parallel_method: all_to_all shares out heads, but 4 ranks do not divide the 4 and 2"));
  EXPECT_THAT(refused(2, {"model.document_end=300"}), HasSubstr("model.document_end: is 300, but the data have"));
  EXPECT_THAT(refused(2, {"context_parallel_method=ring"}), HasSubstr("context_parallel_method"));
  EXPECT_THAT(refused(2, {"context_parallel_degree=2", "context_parallel_method=shared", "run.backend=gloo"}),
              HasSubstr("needs ranks that share a host's memory"));
}

}  // namespace
}  // namespace tesserae::train
