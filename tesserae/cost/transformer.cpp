#include "tesserae/cost/transformer.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/context/parallel.h"

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

Kept kept_by_block(const model::GptConfig& model, const Execution& run) {
  const double T = run.tensor, c = run.compute_bytes;
  const double stream = c * static_cast<double>(model.dimension) / stream_parts(run);
  const double d = c * static_cast<double>(model.dimension) / T, kv = c * static_cast<double>(kv_dimension(model)) / T;
  const double f = c * static_cast<double>(model.feed_forward) / T;
  // Query, key, value, attention's result and its log-sum-exp in fp32; gate, silu, up and product.
  Kept kept{d, kv, kv, d, 4 * static_cast<double>(model.heads) / T, f, f, f, f};
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

/// Bytes for each token of gradients at the fullest moment of a block's backward, beyond what is freed by then: those
/// of the gate and of what it gates, and of the residual stream on its two ways.
double gradient_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  const auto d = static_cast<double>(model.dimension), f = static_cast<double>(model.feed_forward);
  return run.compute_bytes * (2 * f / run.tensor + 2 * d / stream_parts(run));
}

/// Bytes for each token of a rank that the attention of one layer takes while keys and values come and their gradients
/// go, piece by piece: what is sent, what is worked on, what comes, and three of these in fp32.
double exchange_bytes_of_token(const model::GptConfig& model, const Execution& run) {
  const auto both = 2 * static_cast<double>(kv_dimension(model)) / run.tensor;
  return run.context == 1 ? 0 : 3 * both * (run.compute_bytes + 4);
}

}  // namespace

PartSizes part_sizes(const model::GptConfig& given, int tensor) {
  const model::GptConfig model = resolved(given);
  if (model.experts > 0) {
    throw InvalidArgument("part_sizes",
                          cat("experts is ", model.experts,
                              ": mixtures of experts have other formulas than the dense models of the plan"));
  }
  if (tensor < 1) throw InvalidArgument("part_sizes", cat("tensor-parallel degree ", tensor));
  require_divisible("heads", model.heads, tensor);
  require_divisible("kv_heads", model.kv_heads, tensor);
  require_divisible("feed_forward", model.feed_forward, tensor);
  const model::GptSizes whole = model::sizes(model);
  const int64_t norms = 2 * model.dimension;
  const int64_t rows = round_up(model.vocabulary, tensor) / tensor;
  PartSizes part;
  part.block = (whole.block - norms) / tensor + norms;
  part.head = model.tied ? 0 : rows * model.dimension;
  part.root = rows * model.dimension + model.dimension;
  part.total = part.block * model.layers + part.head + part.root;
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
  const double head = norm_bytes_of_token(model, run) + rows_of(model, run) * logit_bytes(c);
  const double gradients = gradient_bytes_of_token(model, run);
  Activations result;
  result.exchange = tokens * exchange_bytes_of_token(model, run);
  if (!run.recompute) {  // the head is gone when the backward of the blocks begins
    result.blocks = tokens * (layers * block + std::max(0.0, gradients - head));
  } else {
    result.blocks = tokens * (layers * input + std::max(0.0, block + gradients - head));
  }
  result.head = tokens * head;
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
  const auto matrices = static_cast<double>(model::sizes(model).block - 2 * model.dimension);
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
  const double of_block = 4 + (run.sequence_parallel ? 6 : 4) + (run.recompute ? 4 : 0);
  const double of_root = run.sequence_parallel ? 5 : 4;  // embedding and head
  const double loss = 2 * share * 12 * tokens;           // a maximum and two sums of each token, in fp32
  const double calls = (of_block * layers + of_root) / (run.sequence_parallel ? 1 : 2) + 3;
  return {.bytes = (of_block * layers + of_root) * one + loss, .calls = calls};
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

}  // namespace tesserae::cost
