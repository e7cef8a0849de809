#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/train_job.h"

// `tesserae train` with context-parallel ranks: the numbers of a run do not depend on how sequences are cut.

namespace tesserae::train {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ContextJob : public testing::Test {
 protected:
  /// A model of 4 heads without dropout, on `count` ranks.
  static std::vector<std::string> ranks(int count, const std::vector<std::string>& more) {
    std::vector<std::string> all = {"--nproc", std::to_string(count), "--set", "model.heads=4",
                                    "--set",   "model.dropout=0",     "--set", "train.sample_tokens=8"};
    for (const std::string& assignment : more) all.insert(all.end(), {"--set", assignment});
    return all;
  }

  void expect_same_losses(const std::string& run, const std::string& reference) const {
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(reference);
    ASSERT_GE(lines.size(), 12u);
    for (size_t i = 1; i <= std::min(lines.size(), expected.size()); ++i) {
      const config::Json &line = lines[lines.size() - i], &wanted = expected[expected.size() - i];
      const double loss = wanted["loss"], norm = wanted["grad_norm"];
      EXPECT_NEAR(line["loss"].get<double>(), loss, 1e-4 * loss) << run << ", " << i << " to go";
      EXPECT_NEAR(line["grad_norm"].get<double>(), norm, 1e-3 * norm) << run << ", " << i << " to go";
    }
    EXPECT_NEAR(lines.back()["val_loss"].get<double>(), expected.back()["val_loss"].get<double>(), 1e-3);
  }

  const TrainJob job_{"context"};
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
  const auto continued = [&](const std::string& run, const std::string& from, int count,
                             const std::vector<std::string>& more) {
    std::vector<std::string> arguments = ranks(count, more);
    arguments.insert(arguments.begin(), {"--resume", job_.path(from + "/checkpoints/step-12")});
    EXPECT_THAT(job_.run(run, arguments), HasSubstr("resumed at step 12 "));
    expect_same_losses(run, "whole");
  };
  continued("both", "whole", 4,
            {"context_parallel_degree=2", "tensor_parallel_degree=2", "train.batch_per_rank=4",
             R"(dial.schedule=[{"step": 15, "hybrid_shard_degree": 1}, {"step": 18, "hybrid_shard_degree": 2}])"});
  job_.run("born-cut", ranks(4, {"context_parallel_degree=4", "train.batch_per_rank=4", saves, "checkpoint.keep=0",
                                 "context_parallel_method=p2p"}));
  expect_same_losses("born-cut", "whole");
  continued("joined", "born-cut", 2, {"sharding.strategy=ZERO_1"});
}

TEST_F(ContextJob, DegreesThatDoNotDivideNameWhatWould) {
  const auto refused = [&](int count, const std::vector<std::string>& more) {
    Program program = job_.start("refused", ranks(count, more));
    const auto exit = program.finish(std::chrono::seconds(100));
    EXPECT_TRUE(exit && !exit->success());
    return program.output + program.errors;
  };
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
