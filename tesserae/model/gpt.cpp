#include "tesserae/model/gpt.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>

#include <memory>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/model/init.h"

namespace tesserae::model {

GptImpl::GptImpl(const GptConfig& config) : config_(resolved(config)) {
  const auto rotary = std::make_shared<Rotary>(config_.dimension / config_.heads, config_.rope_base);
  embedding_ = register_module("embedding", Embedding(config_));
  const auto list = register_module("blocks", std::make_shared<torch::nn::Module>("Blocks"));
  for (int64_t i = 0; i < config_.layers; ++i) {
    blocks_.emplace_back(list->register_module(std::to_string(i), shard::Unit<BlockImpl>(config_, rotary)));
  }
  norm_ = register_module("norm", RmsNorm(config_));
  if (!config_.tied) head_ = register_module("head", Linear(config_.dimension, config_.vocabulary, config_));

  if (config_.device.is_meta()) return;
  const at::NoGradGuard no_grad;
  const auto fill = initialize(config_);
  for (auto& parameter : named_parameters()) fill(parameter.key(), parameter.value());
}

at::Tensor GptImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  if (tokens.dim() != 2 || tokens.size(1) > config_.max_sequence) {
    throw InvalidArgument("Gpt", cat("tokens have shape ", tokens.sizes(), "; it must be [batch, time] with time <= ",
                                     config_.max_sequence, " (max_sequence)"));
  }
  at::Tensor x = embedding_(tokens);
  if (config_.dropout > 0) x = at::dropout(x, config_.dropout, is_training());
  for (auto& block : blocks_) x = block->forward(x);
  x = norm_(x);
  const auto& head = config_.tied ? embedding_->weight : head_->weight;
  if (!targets.defined()) return at::linear(x, head);
  return cross_entropy(at::linear(x, head), targets);
}

void GptImpl::checkpoint_activations_of_blocks(bool on) {
  for (auto& block : blocks_) block->checkpoint_activations(on);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  // log_softmax keeps its output for backward and nothing else: the logits, in whichever dtype, are freed here.
  const auto log_probabilities = at::log_softmax(logits.flatten(0, -2), -1, at::kFloat);
  return at::nll_loss(log_probabilities, targets.flatten(), /*weight=*/{}, at::Reduction::Mean, /*ignore_index=*/-100);
}

}  // namespace tesserae::model
