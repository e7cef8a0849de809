#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tesserae/dial/record.h"
#include "tests/train/mesh_job.h"

// `tesserae train` with tensor-parallel ranks: the numbers of a run do not depend on how layers are split.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class TensorJob : public MeshJob {
 protected:
  TensorJob() : MeshJob("tensor", {"train.sample_tokens=8"}) {}

  /// Both of them from the first step to the last.
  void expect_same_losses_throughout(const std::string& run, const std::string& reference) const {
    ASSERT_EQ(job_.metrics(reference).size(), 24u);
    ASSERT_EQ(job_.metrics(run).size(), 24u);
    expect_same_losses(run, reference);
  }
};

TEST_F(TensorJob, SplitLayersGiveTheSameLosses) {
  job_.run("whole", ranks(2, {"hybrid_shard_degree=2"}));
  const std::string screen = job_.run("split", ranks(4, {"tensor_parallel_degree=2", "hybrid_shard_degree=2"}));
  expect_same_losses_throughout("split", "whole");
  EXPECT_THAT(screen,
              AllOf(HasSubstr("on 4 ranks"), HasSubstr("layers split over 2, P=2 G=2 O=2"), HasSubstr("A sample:")));
  const config::Json summary = job_.summary("split");
  EXPECT_EQ(summary["tensor_parallel_degree"], 2);
  EXPECT_EQ(summary["layout"], (config::Json{{"N", 2}, {"P", 2}, {"G", 2}, {"O", 2}}));
  EXPECT_EQ(summary["world_size"], 4);
  EXPECT_EQ(summary["parameters"], job_.summary("whole")["parameters"]);

  job_.run("repeated", ranks(4, {"tensor_parallel_degree=2", "hybrid_shard_degree=1", "run.backend=gloo",
                                 "sharding.sequence_parallel=false", "model.tied=false"}));
  job_.run("whole-untied", ranks(2, {"hybrid_shard_degree=1", "model.tied=false"}));
  expect_same_losses_throughout("repeated", "whole-untied");
}

TEST_F(TensorJob, CheckpointsAndSnapshotsLoadAtAnyDegree) {
  const std::string saves = "checkpoint.every_steps=12";
  job_.run("whole", ranks(2, {saves, "checkpoint.keep=0"}));
  expect_continues("split", "whole", 4, {"tensor_parallel_degree=2", "hybrid_shard_degree=1"});
  job_.run("born-split",
           ranks(4, {"tensor_parallel_degree=2", saves, "checkpoint.keep=0", "checkpoint.memory_every_steps=5"}));
  expect_continues("four", "born-split", 4, {"tensor_parallel_degree=4", "train.batch_per_rank=4"});
  expect_continues("joined", "born-split", 2, {"sharding.strategy=ZERO_1"});
}

TEST_F(TensorJob, TheDialTurnsAtAnyDegree) {
  const std::vector<std::string> plain = {"tensor_parallel_degree=2", "hybrid_shard_degree=2"};
  job_.run("steady", ranks(4, plain));
  std::vector<std::string> dialed = plain;
  dialed.push_back(R"(dial.schedule=[{"step": 6, "hybrid_shard_degree": 1},
                      {"step": 12, "degrees": {"parameters": 1, "gradients": 1, "optimizer": 2}}])");
  job_.run("dialed", ranks(4, dialed));
  expect_same_losses_throughout("dialed", "steady");
  EXPECT_EQ(job_.summary("dialed")["dial"]["changes"], 2);
}

// Two tensor-parallel ranks of each data-parallel one share the place: the record has the memory of both.
TEST_F(TensorJob, AutoCountsTheTensorRanksOfAPlace) {
  const std::vector<std::string> plain = {"tensor_parallel_degree=2", "train.steps=40"};
  std::vector<std::string> chosen = plain;
  chosen.push_back("hybrid_shard_degree=auto");
  const std::string screen = job_.run("auto", ranks(4, chosen));
  EXPECT_THAT(screen,
              AllOf(HasSubstr("layers split over 2, "), HasSubstr("(auto; estimated to be fastest of what fits: ")));
  const std::string record = os::files().read(job_.path("auto") + "/dial.jsonl");
  const config::Json facts = config::Json::parse(record.substr(0, record.find('\n')))["facts"];
  EXPECT_EQ(facts["tensor"], 2);
  EXPECT_EQ(facts["host_of"], (config::Json{0, 0}));
  const dial::Replay replayed = dial::replay(record);
  ASSERT_EQ(replayed.recorded.size(), 40u);
  for (size_t i = 0; i < replayed.recorded.size(); ++i) {
    const auto &was = replayed.recorded[i].decision, &is = replayed.decided[i];
    ASSERT_EQ(was.has_value(), is.has_value()) << "step " << i + 1;
    if (was) {
      EXPECT_EQ(was->degrees, is->degrees) << "step " << i + 1;
    }
  }
  EXPECT_GE(job_.summary("auto")["dial"]["changes"], 1);

  std::vector<std::string> steady = plain;
  steady.push_back("hybrid_shard_degree=2");
  job_.run("steady", ranks(4, steady));
  const std::vector<config::Json> lines = job_.metrics("auto"), expected = job_.metrics("steady");
  ASSERT_EQ(lines.size(), 40u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const double loss = expected[i]["loss"];
    EXPECT_NEAR(lines[i]["loss"].get<double>(), loss, 1e-3 * loss) << "step " << i + 1;
  }
}

TEST_F(TensorJob, DegreesThatDoNotDivideNameWhatWould) {
  EXPECT_THAT(refused(4, {"tensor_parallel_degree=3"}), HasSubstr("tensor_parallel_degree"));
  EXPECT_THAT(
      refused(4, {"tensor_parallel_degree=4", "model.heads=2"}),
      HasSubstr("tensor_parallel_degree: must divide model.heads = 2, but is 4; heads, kv_heads and feed_forward "
                "can all be split over the divisors of 2"));
  EXPECT_THAT(
      refused(4, {"tensor_parallel_degree=2", "hybrid_shard_degree=4"}),
      HasSubstr("hybrid_shard_degree: hybrid_shard_degree=4 does not divide the 2 ranks; nearest valid: 2; N = 2 "
                "= 4 ranks / tensor_parallel_degree 2; this fits tensor_parallel_degree 1\n"));
  EXPECT_THAT(refused(4, {"tensor_parallel_degree=4", R"(dial.schedule=[{"step": 6, "hybrid_shard_degree": 2}])"}),
              HasSubstr("N = 1 = 4 ranks / tensor_parallel_degree 4; this fits tensor_parallel_degree 1, 2\n"));
  EXPECT_THAT(refused(4, {"tensor_parallel_degree=2", "hybrid_shard_degree=3"}),
              HasSubstr("N = 2 = 4 ranks / tensor_parallel_degree 2\n"));
}

}  // namespace
}  // namespace tesserae::train
