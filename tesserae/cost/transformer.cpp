#include "tesserae/cost/transformer.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/context/parallel.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/tensor/product.h"

// docs/plan.md derives the formulas of this file.
namespace tesserae::cost {
namespace {

int64_t kv_dimension(const model::GptConfig& model) {
  return model.dimension / model.heads * model.kv_heads;
}

void require_divisible(const char* field, int64_t value, int tensor) {
  if (value % tensor == 0) return;
  std::string good = "1";
  for (int64_t divisor = 2; divisor <= std::min<int64_t>(value, 1024); ++divisor) {
    if (value % divisor == 0) good += cat(", ", divisor);
  }
  throw InvalidArgument("part_sizes", cat("tensor-parallel degree ", tensor, " does not divide ", field, " = ", value,
                                          "; these do: ", good));
}

/// In how many parts the residual stream between the split layers is cut.
double stream_parts(const Execution& run) {
  return run.sequence_parallel ? run.tensor : 1;
}

// Bytes for each token of the tensors that something keeps for its backward, one by one.
using Kept = std::vector<double>;

double sum(const Kept& kept) {
  return std::accumulate(kept.begin(), kept.end(), 0.0);
}

/// What a norm takes and gives. A composed one computes in fp32, and keeps what it takes and what it gives before the
/// weight in that; what it gives, in the dtype of activations.
Kept kept_by_norm(const model::GptConfig& model, const Execution& run) {
  const double values = static_cast<double>(model.dimension) / stream_parts(run), given = run.compute_bytes * values;
  return run.composed_norms ? Kept{4 * values, 4 * values, given} : Kept{given, given};
}

/// Feed-forward layers of a block that every token goes through.
double always_used(const model::GptConfig& model) {
  return model.experts > 0 ? static_cast<double>(model.shared_experts) : 1;
}

/// What a router and the experts that it chooses keep. Logits and scores are in fp32; experts take and give a row for
/// each choice.
Kept kept_by_mixture(const model::GptConfig& model, const Execution& run) {
  const auto chosen = static_cast<double>(model.experts_per_token), experts = static_cast<double>(model.experts);
  const double c = run.compute_bytes, index = 8;
  const double row = c * static_cast<double>(model.dimension);
  const double f = c * static_cast<double>(model.feed_forward) / run.tensor;
  Kept kept{4 * experts, 4 * experts};
  if (run.compute_bytes < 4) kept.push_back(4 * static_cast<double>(model.dimension) / stream_parts(run));
  kept.insert(kept.end(), 4, chosen * index);  // of each choice its expert, its token, its row, and which a row is
  if (run.expert > 1) kept.insert(kept.end(), 2, chosen * index);  // the order in which rows came
  kept.insert(kept.end(), {chosen * row, chosen * f, chosen * f, chosen * f, chosen * f, chosen * row});
  return kept;
}

Kept kept_by_block(const model::GptConfig& model, const Execution& run) {
  const double T = run.tensor, c = run.compute_bytes;
  const double stream = c * static_cast<double>(model.dimension) / stream_parts(run);
  const double d = c * static_cast<double>(model.dimension) / T, kv = c * static_cast<double>(kv_dimension(model)) / T;
  const double f = c * static_cast<double>(model.feed_forward) / T;
  // Query, key, value, attention's result and its log-sum-exp in fp32; gate, silu, up and product.
  Kept kept{d, kv, kv, d, 4 * static_cast<double>(model.heads) / T};
  if (const double always = always_used(model); always > 0) kept.insert(kept.end(), 4, always * f);
  if (model.experts > 0) {
    const Kept mixture = kept_by_mixture(model, run);
    kept.insert(kept.end(), mixture.begin(), mixture.end());
  }
  // Attention over context ranks gives its result in another order of dimensions than the layer after it reads.
  if (run.context > 1) kept.insert(kept.end(), {d, d});
  for (int branch = 0; branch < 2; ++branch) {
    const Kept norm = kept_by_norm(model, run);
    kept.insert(kept.end(), norm.begin(), norm.end());
    if (model.dropout > 0) kept.push_back(stream);  // which values it drops
  }
  return kept;
}

double norm_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  return sum(kept_by_norm(model, run));
}

double block_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  return sum(kept_by_block(model, run));
}

/// The rows of the vocabulary that a tensor-parallel rank has.
double rows_of(const model::GptConfig& model, const Execution& run) {
  return static_cast<double>(round_up(model.vocabulary, run.tensor)) / run.tensor;
}

struct KeptByUnit {
  std::string unit;
  Kept kept;
};

/// Unit by unit, in the order of the backward: the loss, the head, the last norm, the blocks from the last to the
/// first, the embedding. What the root computes between units is a unit each time. A tied head is the root's.
std::vector<KeptByUnit> kept_by_units(const model::GptConfig& model, const Execution& run) {
  const double input = run.compute_bytes * static_cast<double>(model.dimension) / stream_parts(run);
  Kept loss{4 * rows_of(model, run)}, norm = kept_by_norm(model, run);
  norm.pop_back();  // what it gives is what the head keeps
  std::vector<KeptByUnit> units;
  if (model.tied) {
    loss.push_back(input);
    loss.insert(loss.end(), norm.begin(), norm.end());
    units = {{"root", loss}};
  } else {
    units = {{"root", loss}, {"head", {input}}, {"root", norm}};
  }
  for (int64_t block = model.layers; block-- > 0;) {
    units.push_back({cat("blocks.", block), run.recompute ? Kept{input} : kept_by_block(model, run)});
  }
  if (model.dropout > 0) units.push_back({"root", {input}});
  return units;
}

/// Bytes for each token of what the backward of a split layer gathers of its input, and of the gradient of that before
/// it is cut.
double gathered_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  return stream_parts(run) > 1 ? 2 * run.compute_bytes * static_cast<double>(model.dimension) : 0;
}

/// Bytes for each token of gradients at the fullest moment of a block's backward, beyond what is freed by then: those
/// of the gate and of what it gates (of experts, for each choice), and of the residual stream on its two ways.
double gradient_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  const double chosen = model.experts > 0 ? static_cast<double>(model.experts_per_token) : 1;
  const auto d = static_cast<double>(model.dimension), f = chosen * static_cast<double>(model.feed_forward);
  return run.compute_bytes * (2 * f / run.tensor + 2 * d / stream_parts(run)) + gathered_bytes_of_token(model, run);
}

/// Bytes of the fp32 copies that a widened product [m, k] x [k, n] takes: of the smaller operand, and of the other and
/// the result block by block.
double bytes_of_copies(double m, double k, double n) {
  const double block = tensor::kProductBlockBytes;
  return 4 * k * std::min(m, n) + std::min(block, 4 * std::max(m, n) * (k + std::min(m, n)));
}

/// Those of the products of a layer [in, out], for the tokens of a rank.
struct Copies {
  double result = 0, of_input = 0, of_weight = 0;  // forward, and the gradients

  double most() const { return std::max({result, of_input, of_weight}); }
};
Copies copies_of_layer(const Execution& run, double in, double out) {
  if (!run.widened) return {};
  const double tokens = run.tokens();
  return {bytes_of_copies(tokens, in, out), bytes_of_copies(tokens, out, in), bytes_of_copies(out, tokens, in)};
}

/// Bytes for each token of a rank that the attention of one layer takes while keys and values come and their gradients
/// go, piece by piece: what is sent, what is worked on, what comes, and three of these in fp32.
double exchange_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  const auto both = 2 * static_cast<double>(kv_dimension(model)) / run.tensor;
  return run.context == 1 ? 0 : 3 * both * (run.compute_bytes + 4);
}

}  // namespace

PartSizes part_sizes(const model::GptConfig& given, int tensor, int expert) {
  const model::GptConfig model = resolved(given);
  if (expert < 1) throw InvalidArgument("part_sizes", cat("expert-parallel degree ", expert));
  const int64_t experts = experts::experts_of_rank(model.experts, expert);
  if (tensor < 1) throw InvalidArgument("part_sizes", cat("tensor-parallel degree ", tensor));
  require_divisible("heads", model.heads, tensor);
  require_divisible("kv_heads", model.kv_heads, tensor);
  require_divisible("feed_forward", model.feed_forward, tensor);
  const model::GptSizes whole = model::sizes(model);
  const int64_t unsplit = (2 + model.experts) * model.dimension;  // norms, and a router
  const int64_t rows = round_up(model.vocabulary, tensor) / tensor;
  PartSizes part;
  part.block = (whole.block - whole.experts - unsplit) / tensor + unsplit;
  part.experts = model.experts == 0 ? 0 : whole.experts / model.experts * experts / tensor;
  part.head = model.tied ? 0 : rows * model.dimension;
  part.root = rows * model.dimension + model.dimension;
  part.total = (part.block + part.experts) * model.layers + part.head + part.root;
  return part;
}

Activations activations_of(const model::GptConfig& given, const Execution& run) {
  const model::GptConfig model = resolved(given);
  const double tokens = run.tokens();
  const auto layers = static_cast<double>(model.layers);
  const double c = run.compute_bytes;
  const auto d = static_cast<double>(model.dimension);
  const double input = c * d / stream_parts(run);
  const double block = block_bytes_of_token(model, run);
  const double head =
      norm_bytes_of_token(model, run) + rows_of(model, run) * logit_bytes(c) + gathered_bytes_of_token(model, run);
  const double gradients = gradient_bytes_of_token(model, run);
  Activations result;
  result.exchange = tokens * exchange_bytes_of_token(model, run);
  const double rows = rows_of(model, run), of_head = run.gradients_apart ? c * d * rows : 0;
  // The gradient of the input comes first, then that of the weight. Without a split the logits are gone by then.
  const Copies copies = copies_of_layer(run, d, rows);
  const double in_head =
      std::max(copies.of_input, of_head + copies.of_weight) - (run.tensor > 1 ? 0 : tokens * c * rows);
  // A tied head's stays until the embedding adds its rows. Gate and up get theirs together, when what they gave and
  // what was made of it is gone.
  const double f = static_cast<double>(model.feed_forward) / run.tensor, of_gate_and_up = 2 * c * d * f;
  const bool apart = run.gradients_apart && model.experts == 0;
  const double in_block = tokens * (gradients + (run.recompute ? block : 0)) + (model.tied ? of_head : 0) +
                          (apart ? std::max(0.0, of_gate_and_up - tokens * 4 * c * f) : 0) +
                          copies_of_layer(run, d, std::max(f, d / run.tensor)).most();
  result.head = tokens * head;
  result.blocks = tokens * layers * (run.recompute ? input : block);
  // The head is gone when the backward of blocks begins.
  result.blocks += std::max({0.0, in_head, in_block - result.head});
  return result;
}

// The loss is computed in fp32, but block by block: what is kept are the logits, until there is their gradient.
double logit_bytes(double compute_bytes) {
  return 2 * compute_bytes;
}

double kept_by_blocks(const model::GptConfig& given, const Execution& run) {
  const model::GptConfig model = resolved(given);
  return run.tokens() * static_cast<double>(model.layers) * block_bytes_of_token(model, run);
}

double leaving_bytes(const model::GptConfig& given, const Execution& run, const Leaving& leaving) {
  double bytes = 0;
  int horizon = leaving.horizon;
  for (const auto& [unit, kept] : kept_by_units(resolved(given), run)) {
    if (leaving.of && !leaving.of(unit)) continue;
    double of_unit = 0;
    for (const double of_token : kept) {
      if (const double tensor = of_token * run.tokens(); tensor >= leaving.smallest) of_unit += tensor;
    }
    if (of_unit > 0 && horizon-- <= 0) bytes += of_unit;  // one from which nothing leaves takes no place in the horizon
  }
  return bytes;
}

double operations_of_token(const model::GptConfig& given, const Execution& run) {
  const model::GptConfig model = resolved(given);
  const auto d = static_cast<double>(model.dimension), layers = static_cast<double>(model.layers);
  const model::GptSizes sizes = model::sizes(model);
  // Of the experts those that a token goes through.
  const double used = model.experts == 0 ? 0
                                         : static_cast<double>(sizes.experts) / static_cast<double>(model.experts) *
                                               static_cast<double>(model.experts_per_token);
  const double matrices = static_cast<double>(sizes.block - sizes.experts - 2 * model.dimension) + used;
  const double attention =
      2 * d * static_cast<double>(run.sequence);  // scores and their use, half of them by causality
  const double forward = layers * (2 * matrices + attention);
  const double head = 2 * d * static_cast<double>(model.vocabulary);
  return forward * (run.recompute ? 4 : 3) + head * 3;
}

AxisTraffic tensor_traffic_of(const model::GptConfig& given, const Execution& run) {
  if (run.tensor == 1) return {};
  const model::GptConfig model = resolved(given);
  // One all-gather or reduce-scatter of the residual stream; an all-reduce sends as much as two.
  const double tokens = run.tokens();
  const auto layers = static_cast<double>(model.layers);
  const double share = static_cast<double>(run.tensor - 1) / run.tensor;
  const double one = share * tokens * static_cast<double>(model.dimension) * run.compute_bytes;
  const bool split = run.sequence_parallel, mixture = model.experts > 0;
  double forward = 4, backward = split ? 6 : 4;
  double of_routing = 0, calls_of_routing = 0;  // bytes and calls beside those of the residual stream
  if (mixture) {
    // Experts keep the rows that they took, so that their backward gathers nothing; shared ones are another layer.
    if (split) backward -= 1;
    if (model.shared_experts > 0) {
      forward += 2;
      backward += split ? 3 : 2;
    }
    const auto experts = static_cast<double>(model.experts), chosen = static_cast<double>(model.experts_per_token);
    const double passes = run.recompute ? 2 : 1;
    of_routing = 2 * 4 * chosen * share * tokens;  // gradients of the weights of choices
    calls_of_routing = 1;
    if (split) {  // each rank scores its tokens: the logits are gathered, the gradient of the router is summed
      of_routing += (passes * tokens + 2 * static_cast<double>(model.dimension)) * 4 * experts * share;
      calls_of_routing += passes + 1;
    }
  }
  const double of_block = forward + backward + (run.recompute ? forward : 0);
  const double of_root = run.sequence_parallel ? 5 : 4;  // embedding and head
  const double loss = 2 * share * 12 * tokens;           // a maximum and two sums of each token, in fp32
  const double calls = (of_block * layers + of_root) / (split ? 1 : 2) + 3 + calls_of_routing * layers;
  return {.bytes = (of_block * layers + of_root) * one + loss + of_routing * layers, .calls = calls};
}

AxisTraffic context_traffic_of(const model::GptConfig& given, const Execution& run) {
  if (run.context == 1) return {};
  const model::GptConfig model = resolved(given);
  const int64_t heads = model.heads / run.tensor, kv_heads = model.kv_heads / run.tensor;
  const auto d = static_cast<double>(model.dimension), k = static_cast<double>(kv_dimension(model));
  const double others = run.context - 1, passes = run.recompute ? 1 : 0;  // of forward, besides the first
  const double elements = run.tokens() * static_cast<double>(model.layers) / run.tensor;
  const auto layers = static_cast<double>(model.layers);
  if (context::exchanges_heads(heads, kv_heads, run.context)) {  // queries, keys, values and results, there and back
    const double share = others / run.context;
    return {.bytes = (2 + passes) * (2 * d + 2 * k) * share * elements * run.compute_bytes,
            .calls = (2 + passes) * 4 * layers};
  }
  // Keys and values to all others in every pass, and their gradients back, in fp32.
  return {.bytes = 2 * k * others * elements * ((2 + passes) * run.compute_bytes + 4),
          .calls = (3 + passes) * others * layers};
}

AxisTraffic expert_traffic_of(const model::GptConfig& given, const Execution& run) {
  if (run.expert == 1) return {};
  const model::GptConfig model = resolved(given);
  const double share = static_cast<double>(run.expert - 1) / run.expert, forwards = run.recompute ? 2 : 1;
  const auto layers = static_cast<double>(model.layers);
  const double rows = run.tokens() * static_cast<double>(model.experts_per_token);
  const double there = share * rows * static_cast<double>(model.dimension) * run.compute_bytes;
  const double counts = share * static_cast<double>(model.experts) * 8;  // rows for each expert, told before they go
  return {.bytes = layers * ((forwards + 1) * 2 * there + forwards * counts),
          .calls = layers * ((forwards + 1) * 2 + forwards)};
}

}  // namespace tesserae::cost
