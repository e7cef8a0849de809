// The example of README.md compiles and trains, and README.md shows exactly this text.

#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tesserae/tesserae.h"
#include "tests/support/ranks.h"

namespace {

std::vector<std::pair<at::Tensor, at::Tensor>> make_batches() {
  const at::Tensor text = at::randint(0, 257, {2, 33}, at::TensorOptions().dtype(at::kLong));
  return {20, {text.narrow(1, 0, 32), text.narrow(1, 1, 32)}};
}

const auto batches = make_batches();

// clang-format off
// example begin
void train() {
  auto fabric = tesserae::Fabric::connect(tesserae::World::from_environment());
  tesserae::Gpt model(tesserae::GptConfig{.dimension = 64, .layers = 2});  // its blocks are tesserae::Unit<Block>
  auto sharded = tesserae::shard_model(
      model, fabric, {.strategy = tesserae::from_hybrid_shard_degree(2, fabric->size())});
  tesserae::AdamW optimizer(sharded, {.lr = 3e-3});
  for (const auto& [tokens, targets] : batches) {
    model(tokens, targets).backward();
    optimizer.step({.clip_norm = 1.0});
    optimizer.zero_grad();
  }
}
// example end
// clang-format on

RANK_MAIN(readme) {
  train();
}

TEST(Readme, TheExampleRunsOnFourRanks) {
  const auto results = tesserae::testing::run_ranks("readme", 4);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Readme, ShowsTheExampleAsItIs) {
  const std::string source = text_of(TESSERAE_SOURCE_DIR "/tests/train/readme_test.cpp");
  const std::string begin = "// example begin\n", end = "// example end\n";
  const size_t from = source.find(begin) + begin.size();
  const std::string example = source.substr(from, source.find(end, from) - from);
  EXPECT_NE(text_of(TESSERAE_SOURCE_DIR "/README.md").find(example), std::string::npos) << "README.md lacks:\n"
                                                                                        << example;
}

}  // namespace
