#include "tesserae/cost/transformer.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/cost/workload.h"

namespace tesserae::cost {
namespace {

using ::testing::HasSubstr;

// A block has 2 x 64 + 2 x 64 of attention, 3 x 128 of feed-forward and 2 x 8 of norms; the root 80 and
// a norm of 8, the head 80.
model::GptConfig tiny() {
  return {.vocabulary = 10, .dimension = 8, .layers = 2, .heads = 2, .feed_forward = 16, .tied = false};
}

TEST(PlanModel, PartsOfTheParameters) {
  EXPECT_EQ(part_sizes(tiny(), 1).block, 656);
  EXPECT_EQ(part_sizes(tiny(), 1).root, 88);
  EXPECT_EQ(part_sizes(tiny(), 1).head, 80);
  EXPECT_EQ(part_sizes(tiny(), 1).total, 1480);
  EXPECT_EQ(part_sizes(tiny(), 1).total, model::sizes(tiny()).total);
  EXPECT_EQ(part_sizes(tiny(), 2).block, 320 + 16) << "norms are not split";
  EXPECT_EQ(part_sizes(tiny(), 2).root, 40 + 8);
  EXPECT_EQ(part_sizes(tiny(), 2).head, 40);
  model::GptConfig odd = tiny();
  odd.vocabulary = 11;
  EXPECT_EQ(part_sizes(odd, 2).root, 6 * 8 + 8) << "12 rows with padding";
  try {
    part_sizes(tiny(), 3);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("degree 3 does not divide heads = 2; these do: 1, 2"));
  }
}

TEST(PlanModel, Activations) {
  // A token of a block: inputs and results of two norms of 8; query and result of 8, key and value of 8, 4 x 16; two
  // bytes each. Two heads keep 4 bytes. Gradients in the last block: of its gate and of what that gates, beyond what
  // the head had, which is gone by then: two norms' worth of 8, logits and their gradient.
  Execution run{.sequence = 3, .micro_batch = 2, .compute_bytes = 2};
  EXPECT_EQ(activations_of(tiny(), run).blocks, 6 * 2 * (2 * (16 + 16 + 96) + 2 * 4) + 6 * (2 * (2 * 16 + 2 * 8) - 72));
  EXPECT_EQ(activations_of(tiny(), run).head, 6 * (2 * 8 + 2 * 8 + 10 * (2 + 2)));
  run.tensor = 2;
  // Both the head and the block gather an input of 8, and have the gradient of it.
  EXPECT_EQ(activations_of(tiny(), run).blocks, 6 * 2 * (2 * (16 + 48) + 4) + 6 * (16 + 2 * 16 - 36));
  EXPECT_EQ(activations_of(tiny(), run).head, 6 * (2 * 4 + 2 * 4 + 5 * (2 + 2) + 2 * 2 * 8));
  run.sequence_parallel = false;
  EXPECT_EQ(activations_of(tiny(), run).blocks, 6 * 2 * (2 * (16 + 16 + 48) + 4) + 6 * (16 + 2 * 16 - 36));
  run = {.sequence = 3, .micro_batch = 2, .compute_bytes = 2, .recompute = true};
  EXPECT_EQ(activations_of(tiny(), run).blocks, 6 * (2 * 2 * 8 + (264 + 2 * (2 * 16 + 2 * 8) - 72)))
      << "a block with its gradients, beyond what the head had";
  run.compute_bytes = 4;
  EXPECT_EQ(activations_of(tiny(), run).head, 6 * (4 * 8 + 4 * 8 + 10 * 8));
  run = {.sequence = 3, .micro_batch = 2, .compute_bytes = 2, .composed_norms = true};
  EXPECT_EQ(activations_of(tiny(), run).blocks, 6 * 2 * (2 * (8 + 2) * 8 + 2 * 96 + 2 * 4)) << "norms keep fp32";
}

TEST(PlanModel, WhatLeavesOfEachUnit) {
  const Execution run{.sequence = 3, .micro_batch = 2, .compute_bytes = 2, .composed_norms = true};
  // Of a token: the loss 10 in fp32, the head 8, the last norm 2 x 8 in fp32, a block as above.
  const double loss = 6 * 10 * 4, head = 6 * 8 * 2, norm = 6 * 2 * 8 * 4;
  const double all = 6 * (2 * (8 + 2) * 8 + 2 * 96 + 2 * 4);
  const auto leaving = [&](int horizon, double smallest = 1, const std::function<bool(const std::string&)>& of = {}) {
    return leaving_bytes(tiny(), run, {.horizon = horizon, .smallest = smallest, .of = of});
  };
  EXPECT_EQ(leaving(0), loss + head + norm + 2 * all);
  EXPECT_EQ(leaving(2), norm + 2 * all) << "the loss and the head are needed first";
  EXPECT_EQ(leaving(4), all);
  EXPECT_EQ(leaving(5), 0);
  // Tensors of a norm in fp32, and of the feed-forward layer, are of 192 bytes and more; so is the loss.
  EXPECT_EQ(leaving(0, 192), loss + norm + 2 * 6 * (4 * 8 * 4 + 4 * 16 * 2));
  EXPECT_EQ(leaving(1, 192), norm + 2 * 6 * (4 * 8 * 4 + 4 * 16 * 2)) << "a head of which nothing leaves is no unit";
  EXPECT_EQ(leaving(0, 1, [](const std::string& unit) { return unit == "blocks.1"; }), all);
  Execution recomputed = run;
  recomputed.recompute = true;
  EXPECT_EQ(leaving_bytes(tiny(), recomputed, {.horizon = 3, .smallest = 1}), 2 * 6 * 8 * 2) << "inputs";
  model::GptConfig tied = tiny();
  tied.tied = true;
  EXPECT_EQ(leaving_bytes(tied, run, {.horizon = 1, .smallest = 1}), 2 * all) << "all of the end is one unit";
  tied.dropout = 0.1;
  EXPECT_EQ(leaving_bytes(tied, run, {.horizon = 1, .smallest = 1}), 2 * (all + 2 * 6 * 8 * 2) + 6 * 8 * 2);
}

TEST(PlanModel, OperationsAndTraffic) {
  Execution run{.sequence = 6, .compute_bytes = 2};
  // Forward: 2 x 640 of matrices and 2 x 8 x 6 of attention a block; 160 of the head; backward twice that.
  EXPECT_EQ(operations_of_token(tiny(), run), 3 * (2 * (1280 + 96) + 160));
  EXPECT_EQ(tensor_traffic_of(tiny(), run).bytes, 0);
  run.recompute = true;
  EXPECT_EQ(operations_of_token(tiny(), run), 4 * 2 * (1280 + 96) + 3 * 160);
  run.tensor = 2;
  // A gather of 6 x 8 values of 2 bytes between two ranks sends 48 bytes of each; the loss three sums of 6 x 4 bytes.
  EXPECT_EQ(tensor_traffic_of(tiny(), run).bytes, 48 * (2 * 14 + 5) + 72);
  EXPECT_EQ(tensor_traffic_of(tiny(), run).calls, 2 * 14 + 5 + 3);
  run.recompute = false;
  run.sequence_parallel = false;
  EXPECT_EQ(tensor_traffic_of(tiny(), run).bytes, 48 * (2 * 8 + 4) + 72);
  EXPECT_EQ(tensor_traffic_of(tiny(), run).calls, 2 * 4 + 2 + 3);
}

// Four experts of 3 x 128, a router of 32 and a shared expert, in the place of the feed-forward layer.
model::GptConfig mixture() {
  model::GptConfig model = tiny();
  model.experts = 4;
  model.shared_experts = 1;
  return model;
}

// By the elements that are copied at once, 1 byte each.
TEST(PlanModel, WorkspacesOfTheLargestProduct) {
  const Machine::Workspaces kept{
      .bytes = Curve({{.size = 1, .rate = 1}, {.size = 1000, .rate = 1000}}), .rows = 4, .depth = 6};
  const Transformer model(tiny());
  Execution run{.sequence = 4};
  EXPECT_NEAR(model.workspace(run, kept), 16 * 6, 1e-9) << "into the feed-forward layer, which is deeper than 6";
  run.tensor = 2;
  EXPECT_NEAR(model.workspace(run, kept), 8 * 6, 1e-9);
  run = {.sequence = 3};
  EXPECT_NEAR(model.workspace(run, kept), 16 * 3, 1e-9) << "the gradient of the weight that leads out of it";
  EXPECT_EQ(model.workspace(run, {}), 0) << "nothing is known";
  model::GptConfig words = tiny();
  words.vocabulary = 100;
  run = {.sequence = 4};
  EXPECT_NEAR(Transformer(words).workspace(run, kept), 100 * 6, 1e-9);
}

TEST(PlanModel, PartsOfMixtures) {
  EXPECT_EQ(part_sizes(mixture(), 1).block, 656 + 32);
  EXPECT_EQ(part_sizes(mixture(), 1).experts, 4 * 384);
  EXPECT_EQ(part_sizes(mixture(), 1).total, model::sizes(mixture()).total);
  EXPECT_EQ(part_sizes(mixture(), 2, 4).block, 320 + 16 + 32) << "routers are not split";
  EXPECT_EQ(part_sizes(mixture(), 2, 4).experts, 384 / 2);
  try {
    part_sizes(mixture(), 1, 3);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("4 experts cannot be shared out by an expert-parallel degree of 3"));
  }
}

TEST(PlanModel, WhatMixturesKeep) {
  const Execution run{.sequence = 3, .micro_batch = 2, .compute_bytes = 4};
  model::GptConfig dense = tiny();
  // Beside what a dense block keeps, the shared expert among it: for each of two choices what an expert takes and
  // gives, 8, and 4 x 16; logits and scores of four experts; four tables of choices.
  const double more = 4 * (2 * (8 + 8 + 64) + 2 * 4) + 8 * 4 * 2;
  // In the last block's backward the gradients of two choices.
  const double gradients = 4 * (2 * 2 * 16 + 2 * 8), head = 4 * (8 + 8 + 20);
  const double of_dense = 4 * (2 * 16 + 2 * 8);
  EXPECT_EQ(
      activations_of(mixture(), run).blocks,
      activations_of(dense, run).blocks - 6 * std::max(0.0, of_dense - head) + 6 * 2 * more + 6 * (gradients - head));
  Execution shared_out = run;
  shared_out.expert = 2;
  EXPECT_EQ(activations_of(mixture(), shared_out).blocks, activations_of(mixture(), run).blocks + 6 * 2 * 2 * 2 * 8)
      << "and in which order rows came";
}

TEST(PlanModel, RowsTravelToExperts) {
  Execution run{.sequence = 6, .expert = 4, .compute_bytes = 2};
  // Three quarters of 2 x 6 rows of 8 values, there and back, forward and backward; and four counts.
  EXPECT_EQ(expert_traffic_of(mixture(), run).bytes, 2 * (4 * 9 * 8 * 2 + 3 * 8));
  EXPECT_EQ(expert_traffic_of(mixture(), run).calls, 2 * 5);
  run.recompute = true;
  EXPECT_EQ(expert_traffic_of(mixture(), run).bytes, 2 * (6 * 9 * 8 * 2 + 2 * 3 * 8));
  run.expert = 1;
  EXPECT_EQ(expert_traffic_of(mixture(), run).bytes, 0);
  // Attention, three layers of 3 x 128 and the router.
  EXPECT_EQ(operations_of_token(mixture(), {.sequence = 6}), 3 * (2 * (2 * (256 + 3 * 384 + 32) + 96) + 160));
}

TEST(PlanModel, ContextRanksHaveTheirTokens) {
  Execution whole{.sequence = 8, .micro_batch = 2, .compute_bytes = 2}, cut = whole;
  cut.context = 4;
  // Attention's result is kept in two orders of dimensions, which is 2 x 8 values more of 4 tokens and 2 layers.
  EXPECT_EQ(activations_of(tiny(), cut).blocks, activations_of(tiny(), whole).blocks / 4 + 2 * 8 * 4 * 2 * 2);
  EXPECT_EQ(activations_of(tiny(), cut).head, activations_of(tiny(), whole).head / 4);
  // Keys and values of 8 features each, three times, and three times in fp32, of 4 tokens.
  EXPECT_EQ(activations_of(tiny(), cut).exchange, 4 * 3 * 16 * (2 + 4));
  EXPECT_EQ(activations_of(tiny(), whole).exchange, 0);
  EXPECT_EQ(operations_of_token(tiny(), cut), operations_of_token(tiny(), whole)) << "over all ranks";

  // Four ranks do not divide two heads: 16 values of 4 tokens and 2 layers to 3 others, twice, and gradients back in
  // fp32.
  EXPECT_EQ(context_traffic_of(tiny(), cut).bytes, 3 * 16 * 4 * 2 * (2 * 2 + 4));
  EXPECT_EQ(context_traffic_of(tiny(), cut).calls, 3 * 3 * 2);
  cut.recompute = true;
  EXPECT_EQ(context_traffic_of(tiny(), cut).bytes, 3 * 16 * 4 * 2 * (3 * 2 + 4));
  EXPECT_EQ(context_traffic_of(tiny(), whole).bytes, 0);
  // With eight heads they do: half of queries, keys, values and results of 32 values, there and back.
  model::GptConfig heads = tiny();
  heads.dimension = 16;
  heads.heads = 8;
  cut.recompute = false;
  EXPECT_EQ(context_traffic_of(heads, cut).bytes, 2 * (4 * 16) * 3.0 / 4 * 4 * 2 * 2);
  EXPECT_EQ(context_traffic_of(heads, cut).calls, 2 * 4 * 2);
}

}  // namespace
}  // namespace tesserae::cost
