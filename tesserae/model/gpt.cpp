#include "tesserae/model/gpt.h"

#include <ATen/ops/constant_pad_nd.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"
#include "tesserae/base/work.h"
#include "tesserae/model/init.h"
#include "tesserae/tensor/dropout.h"

namespace tesserae::model {

namespace {

constexpr int64_t ignored = -100;

}  // namespace

GptImpl::GptImpl(const GptConfig& config) : config_(resolved(config)), options_(layer_options(config_)) {
  if (config_.document_end >= config_.vocabulary) {
    throw InvalidArgument("Gpt", cat("document_end is ", config_.document_end,
                                     ", but the vocabulary has the tokens 0 to ", config_.vocabulary - 1));
  }
  const auto rotary = std::make_shared<Rotary>(config_.dimension / config_.heads, config_.rope_base);
  embedding_ =
      register_module("embedding", tensor::VocabularyEmbedding(config_.vocabulary, config_.dimension, options_));
  const auto list = register_module("blocks", std::make_shared<torch::nn::Module>("Blocks"));
  for (int64_t i = 0; i < config_.layers; ++i) {
    const std::string name = std::to_string(i);
    if (config_.experts > 0) {
      mixtures_.emplace_back(list->register_module(name, shard::Unit<MixtureBlockImpl>(config_, rotary)));
    } else {
      blocks_.emplace_back(list->register_module(name, shard::Unit<BlockImpl>(config_, rotary)));
    }
  }
  norm_ = register_module("norm", tensor::RmsNorm(config_.dimension, config_.norm_epsilon, options_));
  if (!config_.tied) {
    head_ = register_module("head", shard::Unit<tensor::ColumnLinear>(config_.dimension, config_.vocabulary, options_));
  }
  if (!config_.device.is_meta()) tensor::fill_parameters(*this, initialize(config_));
}

at::Tensor GptImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  if (tokens.dim() != 2 || tokens.size(1) > config_.max_sequence) {
    throw InvalidArgument("Gpt", cat("tokens have shape ", tokens.sizes(), "; it must be [batch, time] with time <= ",
                                     config_.max_sequence, " (max_sequence)"));
  }
  config_.context->require_same_first(tokens);
  // Rows with documents of their own are one row of more documents.
  const bool packed = config_.document_end >= 0;
  const auto in_row = [packed](const at::Tensor& x) { return packed && x.defined() ? x.reshape({1, -1}) : x; };
  const at::Tensor logits_or_loss = forward_rows(in_row(tokens), in_row(targets), tokens.size(1));
  return targets.defined() || !packed ? logits_or_loss : logits_or_loss.view({tokens.size(0), tokens.size(1), -1});
}

context::SequencePtr GptImpl::sequence_of(const at::Tensor& tokens, int64_t row) const {
  const bool packed = config_.document_end >= 0;
  if (config_.context->size() == 1 && config_.window == 0 && !packed) return nullptr;
  std::vector<int64_t> documents;
  if (packed) {
    const at::Tensor ends = tokens.view(-1).eq(config_.document_end).cpu();
    const bool* const ended = ends.const_data_ptr<bool>();
    for (int64_t i = 0; i < ends.numel(); ++i) {
      if (i % row == 0 || ended[i - 1]) documents.push_back(i);
    }
  }
  const context::Pattern pattern(tokens.size(1), /*causal=*/true, config_.window, std::move(documents));
  return std::make_shared<const context::Sequence>(config_.context, pattern);
}

// `row`: the positions after which another document begins in any case, if any does.
at::Tensor GptImpl::forward_rows(const at::Tensor& tokens, const at::Tensor& targets, int64_t row) {
  const auto sequence = sequence_of(tokens, row);
  const bool cut = sequence != nullptr;
  const int64_t time = cut ? sequence->tokens() : tokens.size(1);
  count_work(Work::tokens, tokens.size(0) * time);
  const int64_t padding = config_.sequence_parallel ? round_up(time, config_.parallel->size()) - time : 0;
  // Pieces of the sequence are equal. What follows a token does not change what is computed for it.
  const auto own = [&](const at::Tensor& x, int64_t value) {
    if (!x.defined()) return x;
    const at::Tensor mine = cut ? sequence->own(x, 1) : x;
    return padding == 0 ? mine : at::constant_pad_nd(mine, {0, padding}, value);
  };
  const auto [result, routing] = forward_padded(own(tokens, 0), own(targets, ignored), sequence);
  if (targets.defined()) {
    const at::Tensor count = targets.ne(ignored).sum();
    const at::Tensor loss = cut ? sequence->mean(result, count) : result.div(count);
    return routing.defined() ? loss.add(routing) : loss;
  }
  const at::Tensor logits = result.narrow(1, 0, time);
  return cut ? sequence->whole(logits, 1) : logits;
}

// The sum of the losses, or the logits; and the losses of routers, if there are any.
std::pair<at::Tensor, at::Tensor> GptImpl::forward_padded(const at::Tensor& tokens, const at::Tensor& targets,
                                                          const context::SequencePtr& sequence) {
  const auto tied = config_.tied ? c10::make_intrusive<autograd::TiedGradient>() : autograd::TiedGradientPtr();
  at::Tensor x = embedding_(tokens, tied);
  if (config_.dropout > 0) {
    const auto placement = config_.sequence_parallel ? tensor::Placement::split : tensor::Placement::repeated;
    x = tensor::dropout(x, config_.dropout, is_training(), placement, config_.parallel);
  }
  for (auto& block : blocks_) x = block->forward(x, sequence);
  at::Tensor routing;
  for (auto& mixture : mixtures_) {
    at::Tensor loss;
    std::tie(x, loss) = mixture->forward(x, sequence);
    routing = routing.defined() ? routing.add(loss) : loss;
  }
  x = norm_(x);
  const at::Tensor logits = config_.tied
                                ? tensor::column_linear(x, autograd::TiedGradient::first(tied, embedding_->weight), {},
                                                        config_.parallel, options_.sequence_dim)
                                : head_->forward(x);
  if (!targets.defined()) {
    return {tensor::gather_from(logits, -1, config_.parallel).narrow(-1, 0, config_.vocabulary), routing};
  }
  return {tensor::vocabulary_cross_entropy(logits, targets, config_.vocabulary, config_.parallel, ignored).sum(),
          routing};
}

void GptImpl::checkpoint_activations_of_blocks(bool on) {
  for (auto& block : blocks_) block->checkpoint_activations(on);
  for (auto& mixture : mixtures_) mixture->checkpoint_activations(on);
}

}  // namespace tesserae::model
