// The examples in C++ of README.md, docs/context.md and docs/tensor.md compile and train, and the pages show exactly
// these texts.

#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/context/parallel.h"
#include "tesserae/tensor/parallel.h"
#include "tesserae/tesserae.h"
#include "tests/support/ranks.h"

namespace {

std::vector<std::pair<at::Tensor, at::Tensor>> make_batches() {
  const at::Tensor text = at::randint(0, 257, {2, 33}, at::TensorOptions().dtype(at::kLong));
  return {20, {text.narrow(1, 0, 32), text.narrow(1, 1, 32)}};
}

const auto batches = make_batches();

// clang-format off
// README.md begin
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
// README.md end

}  // namespace

namespace tesserae {

// On all ranks: libtorch seeds each process otherwise.
std::pair<at::Tensor, at::Tensor> same_batch() {
  at::manual_seed(0);
  return make_batches()[0];
}

void step(Sharded& sharded, const at::Tensor& loss) {
  loss.backward();
  AdamW optimizer(sharded);
  const double norm = optimizer.step().norm;
  if (!(norm > 0)) throw std::runtime_error(cat("no gradients: their norm is ", norm));
}

void train_with_tensor_axis() {
  at::manual_seed(0);
// docs/tensor.md begin
auto job = comm::Fabric::connect(mesh::World::from_environment());
auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(job->size(), {.tensor = 2}));
auto parallel = std::make_shared<const tensor::Parallel>(mesh);
auto state = mesh->over(mesh::axes::state);

model::GptConfig config{.heads = 8, .kv_heads = 4, .parallel = parallel, .sequence_parallel = true};
model::Gpt net(config);
shard::Options options;
options.strategy = mesh::preset("FULL_SHARD", state->size());
options.mesh = mesh;
auto sharded = shard::shard_model(net, state, options);  // a rank feeds the rows of mesh->index(mesh::axes::batch)
// docs/tensor.md end
  const auto [tokens, targets] = same_batch();
  step(sharded, net(tokens, targets));
}

void train_with_context_axis() {
  auto fabric = comm::Fabric::connect(mesh::World::from_environment());
  const shard::Options options;
  const auto [tokens, targets] = same_batch();
// docs/context.md begin
auto mesh = std::make_shared<comm::MeshFabric>(fabric, mesh::Mesh(fabric->size(), {.context = 2}));
model::GptConfig config;
config.context = std::make_shared<const context::Parallel>(mesh);   // collective
model::Gpt net(config);
auto sharded = shard::shard_model(net, mesh->over(mesh::axes::state), options);
auto loss = net(tokens, targets);      // the same whole sequences on all context ranks; the same loss on all
// docs/context.md end
  step(sharded, loss);
}
// clang-format on

}  // namespace tesserae

namespace {

RANK_MAIN(readme) {
  train();
}
RANK_MAIN(tensor_page) {
  tesserae::train_with_tensor_axis();
}
RANK_MAIN(context_page) {
  tesserae::train_with_context_axis();
}

TEST(Readme, TheExampleRunsOnFourRanks) {
  const auto results = tesserae::testing::run_ranks("readme", 4);
  EXPECT_TRUE(results.all_succeeded()) << results.text();
}

TEST(Pages, TheExamplesOfAxesRunOnFourRanks) {
  for (const char* example : {"tensor_page", "context_page"}) {
    const auto results = tesserae::testing::run_ranks(example, 4);
    EXPECT_TRUE(results.all_succeeded()) << example << ": " << results.text();
  }
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Pages, ShowTheExamplesAsTheyAre) {
  const std::string source = text_of(TESSERAE_SOURCE_DIR "/tests/train/readme_test.cpp");
  for (const std::string page : {"README.md", "docs/tensor.md", "docs/context.md"}) {
    const std::string begin = "// " + page + " begin\n", end = "// " + page + " end\n";
    const size_t from = source.find(begin) + begin.size();
    const std::string example = source.substr(from, source.find(end, from) - from);
    EXPECT_GT(example.size(), 100u);
    EXPECT_NE(text_of(TESSERAE_SOURCE_DIR "/" + page).find(example), std::string::npos) << page << " lacks:\n"
                                                                                        << example;
  }
}

}  // namespace
