#include "tesserae/model/config.h"

#include <string_view>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/context/parallel.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/tensor/layers.h"

namespace tesserae::model {

namespace {

void at_least(std::string_view field, int64_t value, int64_t least) {
  if (value < least) throw InvalidArgument("GptConfig", cat(field, " is ", value, "; it must be >= ", least));
}

void check_experts(const GptConfig& config) {
  if (config.experts == 0) {
    const int degree = config.parallel->mesh()->degree(mesh::Axis::expert);
    if (degree == 1) return;
    throw InvalidArgument("GptConfig", cat("experts is 0, but there are ", degree, " expert-parallel ranks"));
  }
  at_least("experts", config.experts, 1);
  at_least("experts_per_token", config.experts_per_token, 1);
  at_least("shared_experts", config.shared_experts, 0);
  if (config.experts_per_token > config.experts) {
    throw InvalidArgument("GptConfig", cat("experts_per_token is ", config.experts_per_token,
                                           "; it must be <= experts, ", config.experts));
  }
  for (const auto& [field, value] : {std::pair<const char*, double>{"balance_loss", config.balance_loss},
                                     {"z_loss", config.z_loss},
                                     {"bias_rate", config.bias_rate},
                                     {"capacity_factor", config.capacity_factor}}) {
    if (!(value >= 0)) throw InvalidArgument("GptConfig", cat(field, " is ", value, "; it must be >= 0"));
  }
  experts::experts_of_rank(config.experts, config.parallel->mesh()->degree(mesh::Axis::expert));
}

}  // namespace

GptConfig resolved(GptConfig config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.feed_forward == 0) config.feed_forward = round_up((checked_mul(config.dimension, 8) + 2) / 3, 32);

  at_least("vocabulary", config.vocabulary, 2);
  at_least("dimension", config.dimension, 2);
  at_least("layers", config.layers, 1);
  at_least("heads", config.heads, 1);
  at_least("kv_heads", config.kv_heads, 1);
  at_least("feed_forward", config.feed_forward, 1);
  at_least("max_sequence", config.max_sequence, 1);
  at_least("window", config.window, 0);
  if (config.dimension % (2 * config.heads) != 0) {
    throw InvalidArgument("GptConfig", cat("dimension ", config.dimension, " / heads ", config.heads,
                                           " is no even number; rotary positions turn pairs of features"));
  }
  if (config.heads % config.kv_heads != 0) {
    throw InvalidArgument("GptConfig", cat("kv_heads ", config.kv_heads, " does not divide heads ", config.heads));
  }
  if (config.parallel == nullptr) config.parallel = std::make_shared<tensor::Parallel>();
  if (config.context == nullptr) config.context = std::make_shared<context::Parallel>();
  tensor::heads_of_rank(config.heads, config.kv_heads, *config.parallel);
  tensor::size_of_part("feed_forward", config.feed_forward, *config.parallel);
  check_experts(config);
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    throw InvalidArgument("GptConfig", cat("dropout is ", config.dropout, "; it must lie in [0, 1)"));
  }
  if (!(config.norm_epsilon > 0)) {
    throw InvalidArgument("GptConfig", cat("norm_epsilon is ", config.norm_epsilon, "; it must be > 0"));
  }
  if (!(config.rope_base > 0)) {
    throw InvalidArgument("GptConfig", cat("rope_base is ", config.rope_base, "; it must be > 0"));
  }
  return config;
}

GptSizes sizes(const GptConfig& given) {
  const GptConfig config = resolved(given);
  const int64_t d = config.dimension;
  const int64_t kv = d / config.heads * config.kv_heads;
  GptSizes sizes;
  const int64_t feed_forward = checked_mul(3 * d, config.feed_forward);
  sizes.experts = checked_mul(feed_forward, config.experts);
  // A router and the shared experts, or the one feed-forward layer, are the block's own.
  const int64_t own = config.experts == 0 ? feed_forward
                                          : checked_add(checked_mul(feed_forward, config.shared_experts),
                                                        checked_mul(config.experts, d));
  sizes.block = checked_add(checked_mul(d, 2 * d + 2 * kv), checked_add(checked_add(own, sizes.experts), 2 * d));
  const int64_t table = checked_mul(config.vocabulary, d);
  sizes.head = config.tied ? 0 : table;
  sizes.root = checked_add(table, d);
  sizes.total = checked_add(checked_mul(sizes.block, config.layers), checked_add(sizes.root, sizes.head));
  return sizes;
}

}  // namespace tesserae::model
