#include "tesserae/model/block.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tesserae/model/gpt.h"
#include "tesserae/tensor/parallel.h"

namespace tesserae::model {
namespace {

void randomize(torch::nn::Module& module, double deviation) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.normal_(0.0, deviation);
}

void copy(torch::nn::Module& to, const std::string& name, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  to.named_parameters()[name].copy_(value);
}

TEST(Block, GroupedQueriesEqualRepeatedHeads) {
  const GptConfig grouped{.dimension = 24, .heads = 6, .kv_heads = 2};
  Block few(grouped);
  randomize(*few, 0.3);
  GptConfig all = grouped;
  all.kv_heads = 6;
  Block many(all);
  for (const auto& parameter : few->named_parameters()) {
    const auto& name = parameter.key();
    auto value = parameter.value().detach();
    if (name == "attention.key.weight" || name == "attention.value.weight") {
      value = value.view({2, 1, 4, 24}).expand({2, 3, 4, 24}).reshape({24, 24});
    }
    copy(*many, name, value);
  }
  const auto x = at::randn({2, 7, 24});
  EXPECT_TRUE(at::allclose(few(x), many(x), 1e-5, 1e-6));
}

TEST(Block, EqualsTheFormulas) {
  const GptConfig config =
      resolved({.dimension = 8, .heads = 2, .kv_heads = 1, .feed_forward = 12, .norm_epsilon = 1e-3});
  Block block(config);
  randomize(*block, 0.5);
  auto p = block->named_parameters();
  auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x.div(x.square().mean(-1, true).add(1e-3).sqrt()).mul(p[name]);
  };
  auto linear = [&](const at::Tensor& x, const std::string& name) { return x.matmul(p[name].t()); };

  const auto x = at::randn({1, 5, 8});
  Rotary rotary(4, config.rope_base);
  const auto normed = norm(x, "attention_norm.weight");
  const auto q = rotary.rotate(linear(normed, "attention.query.weight").view({1, 5, 2, 4}));
  const auto k = rotary.rotate(linear(normed, "attention.key.weight").view({1, 5, 1, 4}));
  const auto v = linear(normed, "attention.value.weight").view({1, 5, 1, 4});
  auto mixed = at::zeros({1, 5, 2, 4});
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t t = 0; t < 5; ++t) {
      const auto keys = k[0].slice(0, 0, t + 1).select(1, 0), values = v[0].slice(0, 0, t + 1).select(1, 0);
      const auto weights = keys.matmul(q[0][t][head]).div(2.0).softmax(0);
      mixed[0][t][head].copy_(weights.matmul(values));
    }
  }
  const auto h = x.add(linear(mixed.view({1, 5, 8}), "attention.output.weight"));
  const auto inner = norm(h, "feed_forward_norm.weight");
  const auto gate = linear(inner, "feed_forward.gate.weight");
  const auto product = gate.mul(gate.sigmoid()).mul(linear(inner, "feed_forward.up.weight"));
  const auto expected = h.add(linear(product, "feed_forward.down.weight"));
  EXPECT_TRUE(at::allclose(block(x), expected, 1e-4, 1e-5));
}

TEST(Block, GradientsAreThoseOfDifferences) {
  const GptConfig config{.dimension = 8, .heads = 2, .kv_heads = 1, .feed_forward = 6};
  Block block(config);
  randomize(*block, 0.4);
  const auto x = at::randn({1, 6, 8}), direction = at::randn({1, 6, 8});
  auto loss = [&] { return block(x).mul(direction).sum(); };
  loss().backward();
  for (const auto& parameter : block->named_parameters()) {
    const at::NoGradGuard no_grad;
    auto value = parameter.value();
    const auto step = at::randn_like(value).mul_(1e-2);
    const double predicted = value.grad().mul(step).sum().item<double>();
    value.add_(step);
    const double above = loss().item<double>();
    value.sub_(step, 2);
    const double below = loss().item<double>();
    value.add_(step);
    EXPECT_NEAR((above - below) / 2, predicted, 0.02 * std::abs(predicted) + 2e-3) << parameter.key();
  }
}

TEST(Block, DropoutOnlyInTraining) {
  Block block(GptConfig{.dimension = 8, .heads = 2, .dropout = 0.5});
  randomize(*block, 0.5);
  const auto x = at::randn({1, 6, 8});
  EXPECT_FALSE(block(x).equal(block(x)));
  block->eval();
  EXPECT_TRUE(block(x).equal(block(x)));
}

uint64_t sent(const comm::Counters& counters) {
  return counters.all_gather.bytes + counters.reduce_scatter.bytes + counters.all_reduce.bytes;
}

// docs/tensor.md has the formulas.
TEST(Block, SendsWhatTheFormulaSays) {
  constexpr int ranks = 4;
  comm::run_local(ranks, [](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    const auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(4, {.tensor = 4}));
    const auto parallel = std::make_shared<const tensor::Parallel>(mesh);
    for (const bool sequence : {false, true}) {
      Block block(
          GptConfig{.dimension = 32, .heads = 8, .kv_heads = 4, .parallel = parallel, .sequence_parallel = sequence});
      randomize(*block, 0.1);
      const int64_t time = 8;
      const auto x = at::randn({2, sequence ? time / ranks : time, 32}).set_requires_grad(true);
      const uint64_t unit = 2 * time * 32 * sizeof(float) * (ranks - 1) / ranks;
      const uint64_t norms = sequence ? 2 * 2 * 32 * sizeof(float) * (ranks - 1) / ranks : 0;
      const uint64_t before = sent(parallel->group().counters());
      const auto y = block(x);
      const uint64_t forward = sent(parallel->group().counters());
      y.sum().backward();
      const uint64_t backward = sent(parallel->group().counters());
      EXPECT_EQ(forward - before, 4 * unit) << sequence;
      EXPECT_EQ(backward - forward, (sequence ? 6 : 4) * unit + norms) << sequence;
    }
  });
}

// What is around the blocks, too: embedding, head, loss and the last norm; and blocks that run again in backward.
TEST(Block, AModelSendsWhatTheFormulasSay) {
  constexpr int ranks = 4;
  constexpr uint64_t rows = 2, time = 8, dimension = 32, layers = 2;
  constexpr uint64_t unit = rows * time * dimension * sizeof(float) * (ranks - 1) / ranks;
  constexpr uint64_t norm = 2 * dimension * sizeof(float) * (ranks - 1) / ranks;
  constexpr uint64_t loss = 2 * 12 * rows * time * (ranks - 1) / ranks;
  comm::run_local(ranks, [&](comm::Fabric& fabric) {
    const std::shared_ptr<comm::Fabric> job(&fabric, [](comm::Fabric*) {});
    const auto mesh = std::make_shared<comm::MeshFabric>(job, mesh::Mesh(4, {.tensor = 4}));
    const auto parallel = std::make_shared<const tensor::Parallel>(mesh);
    const at::Tensor tokens = at::arange(static_cast<int64_t>(rows * time)).view({rows, time});
    for (const bool sequence : {false, true}) {
      for (const bool recompute : {false, true}) {
        for (const bool tied : {false, true}) {
          Gpt net(GptConfig{.vocabulary = 50,
                            .dimension = dimension,
                            .layers = layers,
                            .heads = 8,
                            .kv_heads = 4,
                            .tied = tied,
                            .parallel = parallel,
                            .sequence_parallel = sequence});
          net->checkpoint_activations_of_blocks(recompute);
          const std::string name =
              cat(sequence ? "sequence-parallel" : "repeated", recompute ? ", recomputed" : "", tied ? ", tied" : "");
          const uint64_t before = sent(parallel->group().counters());
          const auto result = net(tokens, tokens);
          const uint64_t forward = sent(parallel->group().counters());
          result.backward();
          const uint64_t backward = sent(parallel->group().counters());
          EXPECT_EQ(forward - before, layers * 4 * unit + 2 * unit + loss) << name;
          const uint64_t of_block = (sequence ? 6 : 4) + (recompute ? 4 : 0);
          const uint64_t around = sequence ? 3 * unit + (2 * layers + 1) * norm : 2 * unit;
          EXPECT_EQ(backward - forward, layers * of_block * unit + around) << name;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tesserae::model
