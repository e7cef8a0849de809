#include "tesserae/model/block.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <utility>

namespace tesserae::model {

namespace {

std::shared_ptr<Rotary> rotary_of(const GptConfig& config) {
  return std::make_shared<Rotary>(config.dimension / config.heads, config.rope_base);
}

}  // namespace

AttentionImpl::AttentionImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary)
    : heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dimension_(config.dimension / config.heads),
      rotary_(std::move(rotary)) {
  const int64_t kv_dimension = kv_heads_ * head_dimension_;
  query_ = register_module("query", Linear(config.dimension, config.dimension, config));
  key_ = register_module("key", Linear(config.dimension, kv_dimension, config));
  value_ = register_module("value", Linear(config.dimension, kv_dimension, config));
  output_ = register_module("output", Linear(config.dimension, config.dimension, config));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const auto q = rotary_->rotate(query_(x).unflatten(-1, {heads_, head_dimension_}));
  const auto k = rotary_->rotate(key_(x).unflatten(-1, {kv_heads_, head_dimension_}));
  const auto v = value_(x).unflatten(-1, {kv_heads_, head_dimension_});
  const auto y = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                  /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                                  /*scale=*/std::nullopt, /*enable_gqa=*/heads_ != kv_heads_);
  return output_(y.transpose(1, 2).flatten(-2));
}

FeedForwardImpl::FeedForwardImpl(const GptConfig& config) {
  gate_ = register_module("gate", Linear(config.dimension, config.feed_forward, config));
  up_ = register_module("up", Linear(config.dimension, config.feed_forward, config));
  down_ = register_module("down", Linear(config.feed_forward, config.dimension, config));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  return down_(at::silu(gate_(x)).mul(up_(x)));
}

BlockImpl::BlockImpl(const GptConfig& given, std::shared_ptr<Rotary> rotary) : dropout_(given.dropout) {
  const GptConfig config = resolved(given);
  if (rotary == nullptr) rotary = rotary_of(config);
  attention_norm_ = register_module("attention_norm", RmsNorm(config));
  attention_ = register_module("attention", Attention(config, std::move(rotary)));
  feed_forward_norm_ = register_module("feed_forward_norm", RmsNorm(config));
  feed_forward_ = register_module("feed_forward", FeedForward(config));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x.add(drop(attention_(attention_norm_(x))));
  return x.add(drop(feed_forward_(feed_forward_norm_(x))));
}

at::Tensor BlockImpl::drop(const at::Tensor& branch) const {
  return dropout_ > 0 ? at::dropout(branch, dropout_, is_training()) : branch;
}

}  // namespace tesserae::model
