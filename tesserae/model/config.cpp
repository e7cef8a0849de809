#include "tesserae/model/config.h"

#include <string_view>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/context/parallel.h"
#include "tesserae/tensor/layers.h"

namespace tesserae::model {

namespace {

void at_least(std::string_view field, int64_t value, int64_t least) {
  if (value < least) throw InvalidArgument("GptConfig", cat(field, " is ", value, "; it must be >= ", least));
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
  sizes.block =
      checked_add(checked_mul(d, 2 * d + 2 * kv), checked_add(checked_mul(3 * d, config.feed_forward), 2 * d));
  const int64_t table = checked_mul(config.vocabulary, d);
  sizes.head = config.tied ? 0 : table;
  sizes.root = checked_add(table, d);
  sizes.total = checked_add(checked_mul(sizes.block, config.layers), checked_add(sizes.root, sizes.head));
  return sizes;
}

}  // namespace tesserae::model
