#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/plan/plan.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/parallel.h"
#include "tesserae/tensor/product.h"
#include "tests/support/counting_allocator.h"

// What the plan computes against what this library really takes.
namespace tesserae::plan {
namespace {

using tesserae::testing::Counting;
using tesserae::testing::CountingAllocator;

model::GptConfig small_model() {
  return {
      .vocabulary = 1000, .dimension = 128, .layers = 4, .heads = 4, .kv_heads = 2, .feed_forward = 352, .tied = false};
}

TEST(PlanMemory, ActivationsAreWhatForwardKeeps) {
  const Counting counting;
  for (const bool recompute : {false, true}) {
    const model::GptConfig config = small_model();
    model::GptImpl model(config);
    model.checkpoint_activations_of_blocks(recompute);
    const cost::Execution run{.sequence = 96, .micro_batch = 3, .compute_bytes = 4, .recompute = recompute};
    const at::Tensor tokens = at::randint(config.vocabulary, {3, 96}, at::kLong);
    model.forward(tokens, tokens);  // tables of positions are made once
    const int64_t before = CountingAllocator::alive;
    const at::Tensor loss = model.forward(tokens, tokens);
    const auto kept = static_cast<double>(CountingAllocator::alive - before);
    // After forward the gradient of the logits is not there yet, and no block runs again.
    const double values = run.tokens();
    double expected = (recompute ? 4 * 4 * 128 * values : cost::activations_of(config, run).blocks) +
                      cost::activations_of(config, run).head - values * 1000 * 4;
    // On the CPU torch composes the norm, which then keeps what it gives before the weight, too.
    expected += (recompute ? 1 : 9) * 4 * 128 * values;
    EXPECT_NEAR(kept, expected, 0.02 * expected) << (recompute ? "recomputed" : "kept");
  }
}

// Bytes that a forward and its backward take beyond what they find, which are gradients, too. Counting is on.
double taken_by_a_step(model::GptImpl& model, int64_t vocabulary) {
  const at::Tensor tokens = at::randint(vocabulary, {2, 128}, at::kLong);
  model.forward(tokens, tokens).backward();
  const int64_t before = CountingAllocator::alive;
  CountingAllocator::peak = before;
  model.forward(tokens, tokens).backward();
  return static_cast<double>(CountingAllocator::peak - before);
}

// Forward and backward together, with gradients that are there already: what a step takes beyond what it finds.
TEST(PlanMemory, TheFullestMomentOfAStep) {
  const Counting counting;
  at::set_num_threads(1);  // the scratch of a kernel, of each thread, is as large as these small activations
  struct Case {
    int64_t vocabulary;
    c10::ScalarType dtype;
    bool recompute;
  };
  for (const auto& [vocabulary, dtype, recompute] : {Case{4000, at::kFloat, false},
                                                     {100, at::kFloat, false},
                                                     {4000, at::kBFloat16, false},
                                                     {100, at::kBFloat16, false},
                                                     {100, at::kFloat, true},
                                                     {100, at::kBFloat16, true}}) {
    const model::GptConfig config{.vocabulary = vocabulary, .dimension = 128, .layers = 4, .heads = 2, .dtype = dtype};
    model::GptImpl model(config);
    model.checkpoint_activations_of_blocks(recompute);
    const cost::Execution run{.sequence = 128,
                              .micro_batch = 2,
                              .compute_bytes = static_cast<int>(c10::elementSize(dtype)),
                              .recompute = recompute,
                              .composed_norms = true,
                              .widened = tensor::widens_products(dtype),
                              .gradients_apart = true};
    const double taken = taken_by_a_step(model, vocabulary);
    const double expected = cost::activations_of(config, run).total();
    EXPECT_NEAR(taken, expected, 0.05 * expected) << vocabulary << " " << dtype << (recompute ? " recomputed" : "");
  }
}

// The same with experts, of which each gets as many tokens as any: with top-k over all of them.
TEST(PlanMemory, TheFullestMomentOfAStepWithExperts) {
  const Counting counting;
  at::set_num_threads(1);
  for (const bool recompute : {false, true}) {
    for (const int64_t vocabulary : {100, 4000}) {
      const model::GptConfig config{
          .vocabulary = vocabulary, .dimension = 128, .layers = 4, .heads = 2, .experts = 4, .experts_per_token = 2};
      model::GptImpl model(config);
      model.checkpoint_activations_of_blocks(recompute);
      const cost::Execution run{.sequence = 128,
                                .micro_batch = 2,
                                .compute_bytes = 4,
                                .recompute = recompute,
                                .composed_norms = true,
                                .gradients_apart = true};
      const double taken = taken_by_a_step(model, vocabulary);
      const double expected = cost::activations_of(config, run).total();
      std::printf("mixture, vocabulary %d%s: computed %.3f MB, taken %.3f (%+.1f %%)\n", static_cast<int>(vocabulary),
                  recompute ? ", recomputed" : "", expected / 1e6, taken / 1e6, 100 * (taken / expected - 1));
      EXPECT_NEAR(taken, expected, 0.02 * expected) << vocabulary << (recompute ? " recomputed" : "");
    }
  }
}

struct Measured {
  double pieces = 0, masters = 0, state = 0, gradients = 0, buffers = 0;
};

Measured measure(const std::shared_ptr<comm::MeshFabric>& mesh, model::GptConfig config, const mesh::Degrees& degrees) {
  config.parallel = std::make_shared<const tensor::Parallel>(mesh);
  model::Gpt model(config);
  shard::Options options;
  options.strategy.degrees = degrees;
  options.mesh = mesh;
  auto sharded = shard::shard_model(model, mesh->over(mesh::axes::state), options);
  optim::AdamW optimizer(sharded, {});
  const at::Tensor tokens = at::randint(1000, {1, 16}, at::kLong);
  model->forward(tokens, tokens).backward();
  optimizer.step({});
  Measured measured;
  for (const shard::Shard& shard : sharded.shards()) {
    measured.masters += static_cast<double>(shard.master.nbytes());
    measured.gradients += static_cast<double>(shard.grad.nbytes());
  }
  optimizer.visit_state([&](const shard::Shard&, std::string_view, at::Tensor& tensor) {
    if (tensor.dim() > 0) measured.state += static_cast<double>(tensor.nbytes());
  });
  for (const shard::FlatBuffer* buffer : sharded.engine().buffers()) {
    measured.pieces += static_cast<double>(buffer->parameter().state_bytes());
  }
  measured.buffers = static_cast<double>(sharded.statistics().pool_reserved_bytes);
  return measured;
}

TEST(PlanMemory, StateIsWhatTheEngineHolds) {
  const Training training{.batch = 4, .run = {.sequence = 16, .compute_bytes = 4}, .reduce_bytes = 4};
  for (const int ranks : {1, 4}) {
    const auto entries = make_plan(cost::Transformer(small_model()), training, {.devices = ranks, .per_host = ranks});
    for (const Entry& entry : entries) {
      if (entry.tensor > 1) continue;
      Measured measured;
      comm::run_local(ranks, [&](comm::Fabric& fabric) {
        const std::shared_ptr<comm::Fabric> borrowed(&fabric, [](comm::Fabric*) {});
        const auto mesh = std::make_shared<comm::MeshFabric>(borrowed, mesh::Mesh(ranks, {}));
        const Measured own = measure(mesh, small_model(), entry.degrees);
        if (fabric.rank() == 0) measured = own;
      });
      const std::string name = cat("N", ranks, " ", to_string(entry.degrees));
      // Chunks are padded: 64 elements for each of O in each of 5 units.
      const double padding = 0.01 * static_cast<double>(model::sizes(small_model()).total);
      EXPECT_NEAR(measured.pieces, entry.state.pieces, padding) << name;
      EXPECT_NEAR(measured.masters, entry.state.masters, padding) << name;
      EXPECT_NEAR(measured.state, entry.state.state, 2 * padding) << name;
      EXPECT_NEAR(measured.buffers, entry.state.gathered + entry.state.reductions, padding) << name;
      const double accumulated =
          entry.micro_batches > 1 ? 4.0 * model::sizes(small_model()).total / entry.degrees.gradients : 0;
      EXPECT_NEAR(measured.gradients, entry.state.gradients - accumulated, padding) << name;
    }
  }
}

// Gradients that add up whole lie in the buffers from which they are reduced.
TEST(PlanMemory, WhatAddsUpWholeTakesNoOtherBuffers) {
  constexpr int ranks = 4;
  const Training training{.batch = 8,
                          .run = {.sequence = 16, .micro_batch = 1, .context = 1, .compute_bytes = 4},
                          .reduce_bytes = 4,
                          .two_hop = false};
  const model::GptConfig config = small_model();
  const double whole = 4.0 * static_cast<double>(model::sizes(config).total);
  int seen = 0;
  for (const Entry& entry : make_plan(cost::Transformer(config), training, {.devices = ranks, .per_host = ranks})) {
    if (entry.tensor > 1 || entry.context > 1) continue;
    ASSERT_EQ(entry.micro_batches, 2);
    double buffers = 0;
    comm::run_local(ranks, [&](comm::Fabric& fabric) {
      const std::shared_ptr<comm::Fabric> borrowed(&fabric, [](comm::Fabric*) {});
      const auto mesh = std::make_shared<comm::MeshFabric>(borrowed, mesh::Mesh(ranks, {}));
      model::Gpt model(config);
      shard::Options options;
      options.strategy.degrees = entry.degrees;
      auto sharded = shard::shard_model(model, mesh->over(mesh::axes::state), options);
      const at::Tensor tokens = at::randint(1000, {1, 16}, at::kLong);
      {
        const shard::NoSync accumulating = sharded.no_sync();
        model->forward(tokens, tokens).backward();
      }
      model->forward(tokens, tokens).backward();
      if (fabric.rank() == 0) buffers = static_cast<double>(sharded.statistics().pool_reserved_bytes);
    });
    // The pool may give a unit a buffer of a larger one's size. Buffers for reductions would be half as much again.
    EXPECT_NEAR(buffers, whole + entry.state.gathered + entry.state.reductions, 0.06 * whole)
        << to_string(entry.degrees);
    ++seen;
  }
  EXPECT_EQ(seen, static_cast<int>(mesh::all_degrees(ranks).size()));
}

/// `experts` > 0: a mixture.
model::GptConfig small_mixture() {
  model::GptConfig config = small_model();
  config.feed_forward = 160;
  config.experts = 4;
  config.shared_experts = 1;
  return config;
}

// What a rank holds between steps and in buffers, for every E and (P, G, O) of 4 ranks.
TEST(PlanMemory, StateOfExpertsIsWhatTheEngineHolds) {
  const model::GptConfig config = small_mixture();
  const Training training{.batch = 4, .run = {.sequence = 16, .expert = 0, .compute_bytes = 4}, .reduce_bytes = 4};
  constexpr int ranks = 4;
  int mixtures = 0;
  for (const Entry& entry : make_plan(cost::Transformer(config), training, {.devices = ranks, .per_host = ranks})) {
    if (entry.tensor > 1 || entry.micro_batches > 1) continue;
    Measured measured;
    comm::run_local(ranks, [&](comm::Fabric& fabric) {
      const std::shared_ptr<comm::Fabric> borrowed(&fabric, [](comm::Fabric*) {});
      const auto mesh = std::make_shared<comm::MeshFabric>(borrowed, mesh::Mesh(ranks, {.expert = entry.expert}));
      const Measured own = measure(mesh, config, entry.degrees);
      if (fabric.rank() == 0) measured = own;
    });
    const std::string name = cat("E", entry.expert, " ", to_string(entry.degrees));
    const auto near = [&](double seen, double computed, const char* what) {
      EXPECT_NEAR(seen, computed, 0.02 * computed) << name << ", " << what;
    };
    near(measured.pieces, entry.state.pieces, "pieces");
    near(measured.masters, entry.state.masters, "masters");
    near(measured.state, entry.state.state, "state");
    near(measured.gradients, entry.state.gradients, "gradients");
    near(measured.buffers, entry.state.gathered + entry.state.reductions, "buffers");
    mixtures += entry.expert > 1 ? 1 : 0;
  }
  EXPECT_EQ(mixtures, 2 * static_cast<int>(mesh::all_degrees(ranks).size()));
}

// The same on two ranks that split layers and sequences: they go from exchange to exchange, so their moments coincide.
TEST(PlanMemory, TheFullestMomentOfAStepOfTensorParallelRanks) {
  const Counting counting;
  at::set_num_threads(1);
  for (const bool recompute : {false, true}) {
    for (const int64_t vocabulary : {128, 4096}) {
      double taken = 0;
      model::GptConfig config{.vocabulary = vocabulary, .dimension = 256, .layers = 4, .heads = 4};
      comm::run_local(2, [&](comm::Fabric& job) {
        const std::shared_ptr<comm::Fabric> borrowed(&job, [](comm::Fabric*) {});
        const auto mesh = std::make_shared<comm::MeshFabric>(borrowed, mesh::Mesh(2, {.tensor = 2}));
        model::GptConfig split = config;
        split.parallel = std::make_shared<const tensor::Parallel>(mesh);
        split.sequence_parallel = true;
        model::GptImpl model(split);
        model.checkpoint_activations_of_blocks(recompute);
        const at::Tensor tokens =
            at::randint(vocabulary, {2, 256}, at::detail::createCPUGenerator(1), at::TensorOptions().dtype(at::kLong));
        model.forward(tokens, tokens).backward();
        for (int repeat = 0; repeat < 5; ++repeat) {
          job.everyone().barrier();
          const int64_t before = CountingAllocator::alive;
          if (job.rank() == 0) CountingAllocator::peak = before;
          job.everyone().barrier();
          model.forward(tokens, tokens).backward();
          job.everyone().barrier();
          const double of_rank = static_cast<double>(CountingAllocator::peak - before) / 2;
          if (job.rank() == 0) taken = repeat == 0 ? of_rank : std::min(taken, of_rank);
        }
      });
      const cost::Execution run{.sequence = 256,
                                .micro_batch = 2,
                                .tensor = 2,
                                .compute_bytes = 4,
                                .recompute = recompute,
                                .composed_norms = true,
                                .gradients_apart = true};  // without an engine nobody says where they go
      const double expected = cost::activations_of(config, run).total();
      std::printf("T=2, vocabulary %d%s: computed %.3f MB, taken %.3f (%+.1f %%)\n", static_cast<int>(vocabulary),
                  recompute ? ", recomputed" : "", expected / 1e6, taken / 1e6, 100 * (taken / expected - 1));
      // Another gathered input may be on its way.
      EXPECT_NEAR(taken, expected, 0.05 * expected + 4.0 * 256 * run.tokens())
          << vocabulary << (recompute ? " recomputed" : "");
    }
  }
}

// Tensor-parallel ranks, in training: what all tensors of all ranks take when a forward ends, the fullest moment but
// for the gradient of the logits, against the sum of the formulas.
struct Size {
  const char* name;
  model::GptConfig config;
  int64_t batch, sequence;
};

std::vector<Size> three_sizes() {
  const auto config = [](int64_t vocabulary, int64_t dimension, int64_t layers, int64_t feed_forward) {
    return model::GptConfig{.vocabulary = vocabulary,
                            .dimension = dimension,
                            .layers = layers,
                            .heads = 8,
                            .kv_heads = 4,
                            .feed_forward = feed_forward,
                            .tied = false};
  };
  return {{"small", config(512, 64, 3, 192), 2, 64},
          {"medium", config(1024, 128, 4, 352), 2, 96},
          {"large", config(1792, 256, 6, 704), 1, 128}};
}

struct Held {
  double computed = 0, measured = 0;  // bytes of one rank
};

Held hold(comm::Fabric& job, const Size& size, const Entry& entry) {
  const std::shared_ptr<comm::Fabric> borrowed(&job, [](comm::Fabric*) {});
  const auto mesh = std::make_shared<comm::MeshFabric>(borrowed, mesh::Mesh(job.size(), {.tensor = entry.tensor}));
  const auto parallel = std::make_shared<const tensor::Parallel>(mesh);
  const auto moment = [&] {  // of all ranks, while none of them does anything
    job.everyone().barrier();
    const auto alive = static_cast<double>(CountingAllocator::alive) / job.size();
    job.everyone().barrier();
    return alive;
  };
  const at::Tensor tokens = at::randint(size.config.vocabulary, {size.batch, size.sequence},
                                        at::detail::createCPUGenerator(1), at::TensorOptions().dtype(at::kLong));
  const double before = moment();
  model::GptConfig config = size.config;
  config.parallel = parallel;
  config.sequence_parallel = true;
  model::Gpt model(config);
  shard::Options options;
  options.strategy = {entry.degrees, /*free_after_forward=*/true, /*free_after_backward=*/true};
  options.mesh = mesh;
  auto sharded = shard::shard_model(model, mesh->over(mesh::axes::state), options);
  optim::AdamW optimizer(sharded, {});
  model->forward(tokens, tokens).backward();
  optimizer.step({});
  const at::Tensor loss = model->forward(tokens, tokens);
  Held held{.measured = moment() - before};

  // On the CPU torch composes each norm, which then keeps d values more; the gradient of the logits is still to come.
  const auto values = static_cast<double>(size.batch * size.sequence);
  const auto d = static_cast<double>(size.config.dimension), layers = static_cast<double>(size.config.layers);
  const double composed = (2 * layers + 1) * 4 * d * values / entry.tensor;
  const double to_come = values * static_cast<double>(size.config.vocabulary) / entry.tensor * 4;
  held.computed = entry.memory() + composed - to_come;
  return held;
}

TEST(PlanMemory, TensorParallelRanksHoldWhatTheFormulaSays) {
  const Counting counting;
  constexpr int ranks = 4;
  for (const Size& size : three_sizes()) {
    const Training training{.batch = 0,
                            .run = {.sequence = size.sequence, .micro_batch = size.batch, .compute_bytes = 4},
                            .reduce_bytes = 4};
    for (int tensor = 1; tensor <= ranks; tensor *= 2) {
      Training step = training;
      step.batch = size.batch * ranks / tensor;  // one micro-batch
      for (const Entry& entry :
           make_plan(cost::Transformer(size.config), step, {.devices = ranks, .per_host = ranks})) {
        const bool whole = entry.degrees.parameters == entry.ranks;  // gathered buffers of all units are in use
        if (entry.tensor != tensor || !whole) continue;
        Held held;
        comm::run_local(ranks, [&](comm::Fabric& job) {
          const Held own = hold(job, size, entry);
          if (job.rank() == 0) held = own;
        });
        EXPECT_NEAR(held.measured, held.computed, 0.05 * held.computed) << size.name << " T=" << tensor;
        std::printf("%s, T=%d, %s: computed %.3f MB a rank, measured %.3f (%+.1f %%)\n", size.name, tensor,
                    to_string(entry.degrees).c_str(), held.computed / 1e6, held.measured / 1e6,
                    100 * (held.measured / held.computed - 1));
      }
    }
  }
}

}  // namespace
}  // namespace tesserae::plan
