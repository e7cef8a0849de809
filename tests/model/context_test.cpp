// Documents, windows, and sequences that ranks share out.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tesserae/base/work.h"
#include "tesserae/context/parallel.h"
#include "tesserae/model/gpt.h"

namespace tesserae::model {
namespace {

constexpr int64_t end = 3;

GptConfig shape_of() {
  return {.vocabulary = 19, .dimension = 16, .layers = 2, .heads = 4, .kv_heads = 2, .max_sequence = 12};
}

double largest(const at::Tensor& difference) {
  return difference.abs().max().item<double>();
}

TEST(GptContext, DocumentsDoNotSeeEachOther) {
  GptConfig config = shape_of();
  config.document_end = end;
  Gpt model(config);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens =
      at::tensor(std::vector<int64_t>{5, 6, end, 7, 8, 9, 10, end, end, 11, 12, 13, 14, 4}).view({2, 7});
  const at::Tensor logits = model->forward(tokens);
  ASSERT_EQ(logits.sizes(), at::IntArrayRef({2, 7, 19}));
  const std::vector<std::pair<int64_t, int64_t>> documents = {{0, 3}, {3, 4}, {7, 1}, {8, 1}, {9, 5}};
  for (const auto& [begin, length] : documents) {
    const at::Tensor alone = model->forward(tokens.view({1, -1}).narrow(1, begin, length));
    EXPECT_LE(largest(logits.view({14, 19}).narrow(0, begin, length) - alone[0]), 1e-5) << "document at " << begin;
  }
}

TEST(GptContext, AWindowForgets) {
  GptConfig config = shape_of();
  config.layers = 1;
  config.window = 3;
  Gpt model(config);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::tensor(std::vector<int64_t>{5, 6, 7, 8, 9, 10}).view({1, 6});
  at::Tensor other = tokens.clone();
  other[0][2] = 11;
  const at::Tensor change = (model->forward(tokens) - model->forward(other)).abs().amax({0, 2});
  for (const int64_t position : {0, 1, 5}) EXPECT_EQ(change[position].item<double>(), 0) << position;
  for (const int64_t position : {2, 3, 4}) EXPECT_GT(change[position].item<double>(), 1e-6) << position;
}

// Fewer tokens than ranks, one token, documents shorter than a rank's share, rows whose targets do not count.
TEST(GptContext, AnyLengthIsSharedOut) {
  for (const int64_t length : {1, 2, 3, 5, 11}) {
    for (const bool packed : {false, true}) {
      GptConfig config = shape_of();
      config.document_end = packed ? end : -1;
      at::manual_seed(static_cast<uint64_t>(length));
      const at::Tensor tokens = at::randint(6, {2, length}, at::kLong);
      at::Tensor targets = at::randint(19, {2, length}, at::kLong);
      if (length > 2) targets[1].slice(0, 0, length - 1).fill_(-100);
      Gpt whole(config);
      const at::Tensor expected = whole->forward(tokens, targets);
      expected.backward();
      comm::run_local(4, [&](comm::Fabric& fabric) {
        const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
        const auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(4, {.context = 4}));
        GptConfig shared_out = config;
        shared_out.context = std::make_shared<const context::Parallel>(mesh);
        Gpt model(shared_out);
        const at::Tensor loss = model->forward(tokens, targets);
        EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
        loss.backward();
        for (const auto& parameter : model->named_parameters()) {
          const at::Tensor sum = parameter.value().grad().clone();
          fabric.everyone().all_reduce(sum);
          EXPECT_LE(largest(sum.div(4) - whole->named_parameters()[parameter.key()].grad()), 1e-6)
              << parameter.key() << ", " << length << (packed ? ", packed" : "");
        }
        const at::NoGradGuard no_grad;
        EXPECT_LE(largest(model->forward(tokens) - whole->forward(tokens)), 1e-5);
      });
    }
  }
}

// What a rank counts of its own makes up what one process counts, however the sequences are shared out.
TEST(GptContext, TokensAndPairsAreCountedOnceHoweverManyRanksShareThem) {
  const at::Tensor tokens = at::ones({2, 12}, at::kLong);
  const auto counts_of = [&tokens](const GptConfig& config) {
    const PerWork before = work_of_this_thread();
    Gpt(config)->forward(tokens, tokens);
    const PerWork& after = work_of_this_thread();
    return std::pair(after[static_cast<size_t>(Work::tokens)] - before[static_cast<size_t>(Work::tokens)],
                     after[static_cast<size_t>(Work::pairs)] - before[static_cast<size_t>(Work::pairs)]);
  };
  constexpr uint64_t pairs = 2 * 2 * 12 * 13 / 2;  // layers, sequences
  EXPECT_EQ(counts_of(shape_of()), std::pair(uint64_t{24}, pairs));
  std::atomic<uint64_t> all_tokens = 0, all_pairs = 0;
  comm::run_local(4, [&](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    const auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(4, {.context = 4}));
    GptConfig config = shape_of();
    config.context = std::make_shared<const context::Parallel>(mesh, context::Method::p2p);
    const auto [own_tokens, own_pairs] = counts_of(config);
    EXPECT_EQ(own_tokens, 6U);
    all_tokens += own_tokens;
    all_pairs += own_pairs;
  });
  EXPECT_EQ(all_tokens, 24U);
  EXPECT_EQ(all_pairs, pairs);
}

}  // namespace
}  // namespace tesserae::model
