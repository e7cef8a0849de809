#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tesserae/cost/step_time.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/model/block.h"
#include "tesserae/model/init.h"
#include "tesserae/probe/measure.h"
#include "tesserae/tensor/functions.h"
#include "tesserae/tensor/product.h"
#include "tesserae/tensor/split_parameters.h"

// The pieces of a transformer, forward and backward, at growing sizes: linear layers and attention by themselves; then
// whole blocks, of which what is left when the first two are taken off is the price of everything that is no product.
namespace tesserae::probe {
namespace {

using cost::Curve;

constexpr int64_t head_features = 64;

struct Scale {
  std::vector<int64_t> sides;  ///< of products
  struct Weights {
    int64_t tokens, side;
    std::vector<int64_t> bytes;  ///< of all of them
  };
  Weights weights;
  std::vector<int64_t> sequences;  ///< of attention
  int64_t heads;                   ///< of attention, over all sequences
  struct Block {
    int64_t tokens, dimension;
  };
  std::vector<Block> blocks;
  std::vector<Block> losses;  ///< tokens and vocabulary
};

/// Host processors are full long before devices are.
Scale scale_for(c10::Device device) {
  if (device.is_cpu()) {
    return {.sides = {32, 64, 128, 256, 512, 1024},
            .weights = {.tokens = 128, .side = 512, .bytes = {4 << 20, 16 << 20, 64 << 20}},
            .sequences = {32, 128, 512, 2048},
            .heads = 8,
            .blocks = {{64, 64}, {128, 128}, {256, 256}, {1024, 256}, {1024, 512}},
            .losses = {{64, 256}, {512, 256}, {256, 4096}, {512, 16384}}};
  }
  return {.sides = {256, 512, 1024, 2048, 4096, 8192},
          .weights = {.tokens = 1024, .side = 4096, .bytes = {64 << 20, 256 << 20, 1 << 30}},
          .sequences = {512, 1024, 2048, 4096, 8192},
          .heads = 32,
          .blocks = {{1024, 1024}, {2048, 2048}, {4096, 4096}, {8192, 4096}},
          .losses = {{1024, 32768}, {4096, 32768}, {4096, 131072}}};
}

struct Pieces {
  const Bench& bench;
  at::TensorOptions options;

  double timed(const std::function<void()>& body) const { return seconds_of(bench.fabric, bench.window, body); }

  Curve products(const std::vector<int64_t>& sides) const {
    std::vector<Curve::Point> points;
    for (const int64_t side : sides) {
      const at::Tensor x = at::randn({side, side}, options), weight = at::randn({side, side}, options);
      const double seconds = timed([&] {
        const at::Tensor y = tensor::product(x, weight.t());  // as a layer multiplies
        tensor::product(y, weight);                           // gradients of what came in, and of the weight
        tensor::product(y.t(), x);
      });
      const auto s = static_cast<double>(side);
      points.push_back({.size = s, .rate = 3 * 2 * s * s * s / seconds});
    }
    return Curve(std::move(points));
  }

  /// The same product with one weight, and with as many as a step goes through before it comes to the first again.
  Curve weights(const Scale::Weights& scale) const {
    const at::Tensor x = at::randn({scale.tokens, scale.side}, options);
    const auto seconds_of_one = [&](int64_t number) {
      const at::Tensor all = at::randn({number, scale.side, scale.side}, options), gradients = at::empty_like(all);
      return timed([&] {
               for (int64_t i = 0; i < number; ++i) {
                 const at::Tensor weight = all[i], y = tensor::product(x, weight.t());
                 tensor::product(y, weight);
                 tensor::product_to(gradients[i], y.t(), x);
               }
             }) /
             static_cast<double>(number);
    };
    const double near = seconds_of_one(1);
    const int64_t bytes = scale.side * scale.side * static_cast<int64_t>(options.dtype().itemsize());
    std::vector<Curve::Point> points;
    for (const int64_t all : scale.bytes) {
      const double longer = seconds_of_one(all / bytes) - near;
      points.push_back(
          {.size = static_cast<double>(all), .rate = static_cast<double>(bytes) / std::max(longer, near / 1000)});
    }
    return Curve(std::move(points));
  }

  Curve attention(const std::vector<int64_t>& sequences, int64_t heads) const {
    std::vector<Curve::Point> points;
    for (const int64_t sequence : sequences) {
      const auto leaf = [&] { return at::randn({1, heads, sequence, head_features}, options).requires_grad_(); };
      const at::Tensor q = leaf(), k = leaf(), v = leaf();
      const double seconds = timed([&] {
        at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true).sum().backward();
        for (const at::Tensor& x : {q, k, v}) at::Tensor(x).mutable_grad() = at::Tensor();
      });
      const auto s = static_cast<double>(sequence);
      const double forward = 2 * s * s * static_cast<double>(heads * head_features);  // half, by causality
      points.push_back({.size = s, .rate = 3 * forward / seconds});
    }
    return Curve(std::move(points));
  }

  /// What a block keeps for its backward, in bytes, and how fast that passes.
  Curve activations(const std::vector<Scale::Block>& blocks, const cost::Machine::Compute& known) const {
    std::vector<Curve::Point> points;
    for (const auto& [tokens, dimension] : blocks) {
      const model::GptConfig config = model::resolved({.vocabulary = 2,
                                                       .dimension = dimension,
                                                       .layers = 1,
                                                       .heads = std::max<int64_t>(1, dimension / head_features),
                                                       .device = options.device(),
                                                       .dtype = c10::typeMetaToScalarType(options.dtype())});
      model::BlockImpl block(config);
      tensor::fill_parameters(block, model::initialize(config));
      const int64_t sequence = std::min<int64_t>(tokens, 512);
      const at::Tensor x = at::randn({tokens / sequence, sequence, dimension}, options).requires_grad_();
      const double seconds = timed([&] {
        block.forward(x).sum().backward();
        for (at::Tensor& parameter : block.parameters()) parameter.mutable_grad() = at::Tensor();
        at::Tensor(x).mutable_grad() = at::Tensor();
      });
      const cost::Execution run{.sequence = sequence,
                                .micro_batch = tokens / sequence,
                                .compute_bytes = static_cast<int>(options.dtype().itemsize()),
                                .composed_norms = options.device().is_cpu()};
      const double kept = cost::kept_by_blocks(config, run);
      cost::Machine machine;
      machine.compute["this"] = known;  // its products and attention
      const cost::ComputeTime of_products = cost::compute_time(config, run, machine, "this");
      const double rest = seconds - of_products.products - of_products.attention;
      // Where products alone seem to take all of it, a twentieth is for the rest: noise must not make it nothing.
      points.push_back({.size = kept, .rate = kept / std::max(rest, seconds / 20)});
    }
    return Curve(std::move(points));
  }

  Curve loss(const std::vector<Scale::Block>& losses) const {
    const auto alone = std::make_shared<const tensor::Parallel>();
    std::vector<Curve::Point> points;
    for (const auto& [tokens, vocabulary] : losses) {
      const at::Tensor logits = at::randn({tokens, vocabulary}, options).requires_grad_();
      const at::Tensor targets = at::randint(vocabulary, {tokens}, options.dtype(at::kLong));
      const double seconds = timed([&] {
        tensor::vocabulary_cross_entropy(logits, targets, vocabulary, alone).sum().backward();
        at::Tensor(logits).mutable_grad() = at::Tensor();
      });
      const auto bytes = static_cast<double>(options.dtype().itemsize());
      const double kept = static_cast<double>(tokens * vocabulary) * cost::logit_bytes(bytes);
      points.push_back({.size = kept, .rate = kept / seconds});
    }
    return Curve(std::move(points));
  }
};

}  // namespace

cost::Machine::Compute measure_compute(const Bench& bench, const std::string& dtype) {
  const Scale scale = scale_for(bench.fabric.device());
  const Pieces pieces{bench, at::TensorOptions(bench.fabric.device()).dtype(scalar_type_of(dtype))};
  cost::Machine::Compute found;
  bench.say(cat("products in ", dtype));
  found.products = pieces.products(scale.sides);
  bench.say(cat("weights in ", dtype));
  found.weights = pieces.weights(scale.weights);
  bench.say(cat("attention in ", dtype));
  found.attention = pieces.attention(scale.sequences, scale.heads);
  bench.say(cat("whole blocks in ", dtype));
  found.activations = pieces.activations(scale.blocks, found);
  bench.say(cat("the loss in ", dtype));
  found.loss = pieces.loss(scale.losses);
  return found;
}

}  // namespace tesserae::probe
