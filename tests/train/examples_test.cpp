#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/os/files.h"
#include "tests/train/run_program.h"

// The commands of README.md and docs/training.md, for fewer steps: they train, and the loss falls.

namespace tesserae::train {
namespace {

struct Example {
  const char* name;
  const char* file;
  std::vector<std::string> settings;
  int ranks = 4;
};

class Examples : public testing::TestWithParam<Example> {};

INSTANTIATE_TEST_SUITE_P(
    Readme, Examples,
    testing::Values(Example{"split_layers", "python-source", {"tensor_parallel_degree=2", "hybrid_shard_degree=2"}},
                    Example{"split_layers_and_sequences",
                            "python-source",
                            {"context_parallel_degree=2", "tensor_parallel_degree=2", "hybrid_shard_degree=2"}},
                    Example{"long_context", "long-context", {}},
                    Example{"mixture", "mixture", {"expert_parallel_degree=2", "hybrid_shard_degree=2"}},
                    Example{
                        "larger_than_memory", "larger-than-memory", {"model.layers=6", "train.batch_per_rank=2"}, 1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Examples, Train) {
  const Example& example = GetParam();
  const std::string folder = cat(testing::TempDir(), "tesserae-example-", example.name, "-", ::getpid());
  std::vector<std::string> arguments = {TESSERAE_PROGRAM, "train",
                                        cat(TESSERAE_SOURCE_DIR, "/examples/", example.file, ".json"), "--nproc",
                                        cat(example.ranks)};
  std::vector<std::string> settings = {"run.folder=" + folder,    "train.steps=6",         "train.eval_every=0",
                                       "train.eval_batches=0",    "train.sample_tokens=0", "optimizer.warmup_steps=1",
                                       "data.sequence_length=128"};
  settings.insert(settings.end(), example.settings.begin(), example.settings.end());
  for (const std::string& setting : settings) arguments.insert(arguments.end(), {"--set", setting});
  Program program(arguments, {{"OMP_NUM_THREADS", "1"}});
  const auto exit = program.finish(std::chrono::seconds(250));
  ASSERT_TRUE(exit && exit->success()) << (exit ? exit->text() : "still runs") << "\n"
                                       << program.output << program.errors;
  const config::Json summary = config::Json::parse(os::files().read(folder + "/summary.json"));
  EXPECT_EQ(summary["steps"], 6);
  EXPECT_LT(summary["last_loss"].get<double>(), 5.5) << "that of 257 tokens by chance is 5.55";
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tesserae::train
