#include "tesserae/model/block.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <utility>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/work.h"
#include "tesserae/context/attention.h"
#include "tesserae/tensor/dropout.h"

namespace tesserae::model {

namespace {

std::shared_ptr<Rotary> rotary_of(const GptConfig& config) {
  return std::make_shared<Rotary>(config.dimension / config.heads, config.rope_base);
}

}  // namespace

AttentionImpl::AttentionImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary)
    : options_(layer_options(config)),
      heads_(tensor::heads_of_rank(config.heads, config.kv_heads, *config.parallel)),
      head_dimension_(config.dimension / config.heads),
      rotary_(std::move(rotary)) {
  const int64_t kv_dimension = config.kv_heads * head_dimension_;
  query_ = register_module("query", tensor::ColumnLinear(config.dimension, config.dimension, options_));
  key_ = register_module("key", tensor::ColumnLinear(config.dimension, kv_dimension, options_));
  value_ = register_module("value", tensor::ColumnLinear(config.dimension, kv_dimension, options_));
  output_ = register_module("output", tensor::RowLinear(config.dimension, config.dimension, options_));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const context::SequencePtr& sequence) {
  const auto all = tensor::column_linear(x, {query_->weight, key_->weight, value_->weight}, {}, options_.parallel,
                                         options_.sequence_dim);
  const auto q = all[0].unflatten(-1, {heads_.query, head_dimension_});
  const auto k = all[1].unflatten(-1, {heads_.key_value, head_dimension_});
  const auto v = all[2].unflatten(-1, {heads_.key_value, head_dimension_});
  const at::Tensor y = sequence == nullptr ? attend(q, k, v) : attend_across(q, k, v, sequence);
  return output_(y.flatten(-2));
}

at::Tensor AttentionImpl::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  if (!autograd::in_backward()) count_work(Work::pairs, q.size(0) * context::Pattern(q.size(1)).pairs({0, q.size(1)}));
  return at::scaled_dot_product_attention(rotary_->rotate(q).transpose(1, 2), rotary_->rotate(k).transpose(1, 2),
                                          v.transpose(1, 2), /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                          /*scale=*/std::nullopt, /*enable_gqa=*/heads_.query != heads_.key_value)
      .transpose(1, 2);
}

at::Tensor AttentionImpl::attend_across(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const context::SequencePtr& sequence) const {
  const at::Tensor positions = sequence->positions(q.device());
  const int64_t length = sequence->cut().pattern().length(), tokens = sequence->tokens();
  const auto own = [&](const at::Tensor& x) { return x.narrow(1, 0, tokens); };
  const auto turned = [&](const at::Tensor& x) { return rotary_->rotate(own(x), positions, length).transpose(1, 2); };
  const at::Tensor y = context::attention(turned(q), turned(k), own(v).transpose(1, 2), sequence).transpose(1, 2);
  const int64_t padding = q.size(1) - tokens;
  return padding == 0 ? y : at::constant_pad_nd(y, {0, 0, 0, 0, 0, padding});
}

AttentionBlock::AttentionBlock(const GptConfig& config, std::shared_ptr<Rotary> rotary)
    : config_(resolved(config)), options_(layer_options(config_)) {
  if (rotary == nullptr) rotary = rotary_of(config_);
  const auto norm = [this] { return tensor::RmsNorm(config_.dimension, config_.norm_epsilon, options_); };
  attention_norm_ = register_module("attention_norm", norm());
  attention_ = register_module("attention", Attention(config_, std::move(rotary)));
  feed_forward_norm_ = register_module("feed_forward_norm", norm());
}

at::Tensor AttentionBlock::attended(const at::Tensor& x, const context::SequencePtr& sequence) {
  return x.add(drop(attention_->forward(attention_norm_(x), sequence)));
}

at::Tensor AttentionBlock::drop(const at::Tensor& branch) const {
  const auto placement =
      options_.sequence_dim == tensor::no_sequence ? tensor::Placement::repeated : tensor::Placement::split;
  return config_.dropout > 0 ? tensor::dropout(branch, config_.dropout, is_training(), placement, options_.parallel)
                             : branch;
}

BlockImpl::BlockImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary)
    : AttentionBlock(config, std::move(rotary)) {
  const tensor::MlpOptions swiglu{.width = config_.dimension,
                                  .hidden = config_.feed_forward,
                                  .activation = tensor::Activation::silu,
                                  .gated = true};
  feed_forward_ = register_module("feed_forward", tensor::Mlp(swiglu, options_));
}

at::Tensor BlockImpl::forward(at::Tensor x, const context::SequencePtr& sequence) {
  x = attended(x, sequence);
  return x.add(drop(feed_forward_(feed_forward_norm_(x))));
}

MixtureBlockImpl::MixtureBlockImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary)
    : AttentionBlock(config, std::move(rotary)) {
  const experts::RoutingOptions routing{.width = config_.dimension,
                                        .experts = config_.experts,
                                        .chosen = config_.experts_per_token,
                                        .balance_loss = config_.balance_loss,
                                        .z_loss = config_.z_loss,
                                        .bias_rate = config_.bias_rate};
  const experts::MoeOptions options{.routing = routing,
                                    .hidden = config_.feed_forward,
                                    .shared_hidden = config_.shared_experts * config_.feed_forward,
                                    .capacity_factor = config_.capacity_factor};
  feed_forward_ = register_module("feed_forward", experts::Moe(options, options_));
}

std::tuple<at::Tensor, at::Tensor> MixtureBlockImpl::forward(at::Tensor x, const context::SequencePtr& sequence) {
  x = attended(x, sequence);
  const auto [y, loss] = feed_forward_->forward(feed_forward_norm_(x));
  return {x.add(drop(y)), loss};
}

}  // namespace tesserae::model
