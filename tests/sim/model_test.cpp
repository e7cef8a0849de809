// The transformer of the command line on simulated accelerators: fp32 and bf16, recomputed activations, clipping; held
// to one process on the CPU, and to itself with other delays.

#include <ATen/ATen.h>

#include <cmath>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/context/parallel.h"
#include "tesserae/model/gpt.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/tensor/parallel.h"
#include "tests/shard/net.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

constexpr int64_t sequence = 12;
constexpr int64_t rows_of_a_step = 8;
constexpr int64_t words = 37;

struct ModelCase {
  bool bf16 = false;
  bool recompute = false;
  bool tied = true;
  shard::CutBy cut_by = shard::CutBy::elements;
  int tensor_degree = 1;
  bool sequence_parallel = false;
  int context_degree = 1;
  context::Method method = context::Method::automatic;
  int64_t window = 0;
  int64_t experts = 0;
  int expert_degree = 1;
};

model::GptConfig shape(const ModelCase& how, c10::Device device) {
  model::GptConfig config;
  config.vocabulary = words;
  config.dimension = 32;
  config.layers = 3;
  config.heads = 4;
  config.kv_heads = 2;
  config.feed_forward = 40;
  config.max_sequence = sequence;
  config.tied = how.tied;
  config.window = how.window;
  config.experts = how.experts;
  config.shared_experts = 1;  // if there are others
  config.device = device;
  return config;
}

std::vector<double> losses_of(const std::shared_ptr<comm::Fabric>& job, const ModelCase& how,
                              const mesh::Degrees& degrees) {
  const int tensor_degree = job->size() == 1 ? 1 : how.tensor_degree;
  const int expert_degree = job->size() == 1 ? 1 : how.expert_degree;
  const int context_degree = job->size() == 1 ? 1 : how.context_degree;
  const auto mesh = std::make_shared<comm::MeshFabric>(
      job, mesh::Mesh(job->size(), {.tensor = tensor_degree, .context = context_degree, .expert = expert_degree}));
  const auto fabric = mesh->over(mesh::axes::state);
  model::GptConfig config = shape(how, job->device());
  config.parallel = std::make_shared<const tensor::Parallel>(mesh);
  config.sequence_parallel = how.sequence_parallel && tensor_degree > 1;
  config.context = std::make_shared<const context::Parallel>(mesh, how.method);
  model::Gpt net(config);
  if (how.recompute) net->checkpoint_activations_of_blocks();
  shard::Options options;
  options.mesh = mesh;
  options.strategy = {degrees, true, true};
  options.cut_by = how.cut_by;
  if (how.bf16) options.precision = shard::Precision::bf16();
  auto sharded = shard::shard_model(net, fabric, options);
  optim::AdamW optimizer(sharded, optim::AdamWOptions{.lr = 1e-2});
  const int64_t batches = mesh->degree(mesh::axes::batch), share = rows_of_a_step / batches;
  std::vector<double> losses;
  for (int64_t step = 0; step < 4; ++step) {
    const at::Tensor tokens =
        at::arange(rows_of_a_step * (sequence + 1)).mul(step + 3).remainder(words).view({rows_of_a_step, sequence + 1});
    const at::Tensor mine = tokens.narrow(0, mesh->index(mesh::axes::batch) * share, share).to(fabric->device());
    const at::Tensor loss = net(mine.narrow(1, 0, sequence), mine.narrow(1, 1, sequence));
    loss.backward();
    losses.push_back(sharded.sum_over_ranks(loss.item<double>()) / fabric->size());
    optimizer.step({.clip_norm = 0.5});
    optimizer.zero_grad();
  }
  return losses;
}

class SimModel : public Sim {
 protected:
  static void expect_parity(const ModelCase& how) {
    const auto expected = losses_of(comm::Fabric::null(mesh::World::single_host(0, 1)), how, {1, 1, 1});
    std::vector<double> first;
    for (uint64_t seed = 0; seed < seeds_of(6); ++seed) {
      restart({.seed = seed});
      std::vector<double> losses;
      run_on_devices(4, [&](comm::Fabric& fabric) {
        const int state = 4 / how.tensor_degree;
        const auto own = losses_of(shard::testing::share(fabric), how, {2, 2, state});
        if (fabric.rank() == 0) losses = own;
      });
      if (first.empty()) first = losses;
      EXPECT_EQ(losses, first) << "other numbers with seed " << seed;
    }
    ASSERT_EQ(first.size(), expected.size());
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_NEAR(first[i], expected[i], (how.bf16 ? 2e-3 : 1e-5) * std::abs(expected[i])) << "step " << i;
    }
  }
};

}  // namespace

TEST_F(SimModel, AStepWaitsForNothing) {
  for (const bool bf16 : {false, true}) {
    run_on_devices(4, [&](comm::Fabric& fabric) {
      model::Gpt net(shape({}, fabric.device()));
      shard::Options options;
      options.strategy = {{4, 4, 4}, true, true};
      if (bf16) options.precision = shard::Precision::bf16();
      auto sharded = shard::shard_model(net, shard::testing::share(fabric), options);
      optim::AdamW optimizer(sharded);
      const at::Tensor tokens = at::arange(2 * sequence).remainder(words).view({2, sequence}).to(fabric.device());
      const Counters spent = spent_by_third(fabric.device().index(), [&] {
        net(tokens, tokens).backward();
        optimizer.step({.measure_norm = false});
        optimizer.zero_grad();
      });
      EXPECT_EQ(spent.synchronizations, 0);
      EXPECT_EQ(spent.unknown_shapes, 0);
      EXPECT_EQ(spent.copied_bytes, 0);
    });
  }
}

TEST_F(SimModel, TrainsInFp32) {
  expect_parity({});
}

TEST_F(SimModel, TrainsInBf16) {
  expect_parity({.bf16 = true});
}

TEST_F(SimModel, SplitsMatrices) {
  expect_parity({.tensor_degree = 2});
}

TEST_F(SimModel, SharesOutExperts) {
  expect_parity({.bf16 = true, .recompute = true, .experts = 4, .expert_degree = 4});
}

TEST_F(SimModel, SharesOutExpertsAndSplitsTheirMatrices) {
  expect_parity({.tensor_degree = 2, .sequence_parallel = true, .experts = 4, .expert_degree = 2});
}

TEST_F(SimModel, SplitsMatricesAndTheSequence) {
  expect_parity({.recompute = true, .tensor_degree = 2, .sequence_parallel = true});
}

TEST_F(SimModel, SharesOutSequencesPieceByPiece) {
  expect_parity({.recompute = true, .context_degree = 4, .method = context::Method::p2p});
}

TEST_F(SimModel, SharesOutSequencesAndGathers) {
  expect_parity({.tensor_degree = 2,
                 .sequence_parallel = true,
                 .context_degree = 2,
                 .method = context::Method::all_gather,
                 .window = 5});
}

TEST_F(SimModel, SharesOutSequencesByHeads) {
  expect_parity({.bf16 = true, .context_degree = 2, .method = context::Method::all_to_all});
}

TEST_F(SimModel, RecomputesActivations) {
  expect_parity({.recompute = true, .tied = false, .cut_by = shard::CutBy::rows});
}

}  // namespace tesserae::sim
