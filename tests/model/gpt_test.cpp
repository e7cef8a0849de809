#include "tesserae/model/gpt.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tesserae/base/error.h"

namespace tesserae::model {
namespace {

const GptConfig small{.vocabulary = 19, .dimension = 16, .layers = 2, .heads = 4, .kv_heads = 2, .max_sequence = 12};

at::Tensor some_tokens(int64_t batch, int64_t time) {
  return at::randint(small.vocabulary, {batch, time}, at::kLong);
}

TEST(Gpt, NamesAndShapes) {
  GptConfig config = small;
  config.tied = false;
  Gpt model(config);
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters.size(), 2u * 9u + 3u);
  EXPECT_EQ(parameters["embedding.weight"].sizes(), at::IntArrayRef({19, 16}));
  EXPECT_EQ(parameters["blocks.1.attention.key.weight"].sizes(), at::IntArrayRef({8, 16}));
  EXPECT_EQ(parameters["blocks.0.feed_forward.down.weight"].sizes(), at::IntArrayRef({16, 64}));
  EXPECT_EQ(parameters["head.weight"].sizes(), at::IntArrayRef({19, 16}));
  EXPECT_EQ(model->forward(some_tokens(3, 12)).sizes(), at::IntArrayRef({3, 12, 19}));
}

TEST(Gpt, BlocksAndAHeadOfItsOwnAreUnits) {
  for (const bool tied : {true, false}) {
    GptConfig config = small;
    config.tied = tied;
    Gpt model(config);
    int units = 0;
    for (const auto& module : model->modules()) units += dynamic_cast<shard::UnitBase*>(module.get()) != nullptr;
    EXPECT_EQ(units, tied ? 3 : 4) << "the root and two blocks, and a head";
  }
}

TEST(Gpt, FutureTokensDoNotChangeThePast) {
  Gpt model(small);
  const auto tokens = some_tokens(2, 10);
  const auto before = model->forward(tokens);
  for (int64_t changed = 0; changed < 10; ++changed) {
    auto other = tokens.clone();
    other.select(1, changed).add_(1).remainder_(small.vocabulary);
    const auto after = model->forward(other);
    EXPECT_TRUE(at::allclose(after.slice(1, 0, changed), before.slice(1, 0, changed), 1e-5, 1e-6)) << changed;
    EXPECT_FALSE(at::allclose(after.select(1, changed), before.select(1, changed), 1e-5, 1e-6)) << changed;
  }
}

TEST(Gpt, LossIsTheMeanOfTheCountedTokens) {
  Gpt model(small);
  const auto tokens = some_tokens(2, 8);
  auto targets = some_tokens(2, 8);
  targets[0][3] = -100;
  targets[1][7] = -100;
  const auto loss = model->forward(tokens, targets);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  const auto probabilities = model->forward(tokens).softmax(-1);
  double sum = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 8; ++t) {
      const auto target = targets[b][t].item<int64_t>();
      if (target >= 0) sum -= std::log(probabilities[b][t][target].item<double>());
    }
  }
  EXPECT_NEAR(loss.item<double>(), sum / 14, 1e-5);
}

TEST(Gpt, TiedHeadUsesTheEmbedding) {
  Gpt tied(small);
  EXPECT_FALSE(tied->named_parameters().contains("head.weight"));
  GptConfig config = small;
  config.tied = false;
  Gpt untied(config);
  {
    const at::NoGradGuard no_grad;
    untied->named_parameters()["head.weight"].copy_(tied->named_parameters()["embedding.weight"]);
  }
  const auto tokens = some_tokens(2, 6), targets = some_tokens(2, 6);
  const auto a = tied->forward(tokens, targets), b = untied->forward(tokens, targets);
  EXPECT_TRUE(a.equal(b));
  a.backward();
  b.backward();
  const auto both =
      untied->named_parameters()["embedding.weight"].grad().add(untied->named_parameters()["head.weight"].grad());
  EXPECT_TRUE(at::allclose(tied->named_parameters()["embedding.weight"].grad(), both, 1e-4, 1e-6));
}

TEST(Gpt, CheckpointingKeepsLossAndGradients) {
  GptConfig config = small;
  config.dropout = 0.3;
  Gpt model(config);
  const auto tokens = some_tokens(2, 6), targets = some_tokens(2, 6);
  auto run = [&](bool checkpoint) {
    model->checkpoint_activations_of_blocks(checkpoint);
    model->zero_grad();
    at::manual_seed(7);
    const auto loss = model->forward(tokens, targets);
    loss.backward();
    std::vector<at::Tensor> results = {loss.detach()};
    for (const auto& parameter : model->named_parameters()) {
      EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
      if (parameter.value().grad().defined()) results.push_back(parameter.value().grad().clone());
    }
    return results;
  };
  const auto kept = run(false), recomputed = run(true);
  ASSERT_EQ(kept.size(), recomputed.size());
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::allclose(kept[i], recomputed[i], 1e-6, 1e-8)) << i;
}

TEST(Gpt, LearnsACycle) {
  Gpt model(small);
  const auto tokens = at::arange(13, at::kLong).remainder(5).unsqueeze(0);
  const auto inputs = tokens.slice(1, 0, 12), targets = tokens.slice(1, 1, 13);
  EXPECT_NEAR(model->forward(inputs, targets).item<double>(), std::log(19.0), 0.3);
  for (int step = 0; step < 200; ++step) {
    model->zero_grad();
    model->forward(inputs, targets).backward();
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.5);
  }
  EXPECT_LT(model->forward(inputs, targets).item<double>(), 0.1);
}

TEST(Gpt, RefusesWhatItCanNotRead) {
  Gpt model(small);
  EXPECT_THROW(model->forward(some_tokens(1, 13)), InvalidArgument);
  EXPECT_THROW(model->forward(some_tokens(1, 4)[0]), InvalidArgument);
}

}  // namespace
}  // namespace tesserae::model
