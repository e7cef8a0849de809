#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <tuple>

#include "tesserae/context/sequence.h"
#include "tesserae/experts/moe.h"
#include "tesserae/model/layers.h"
#include "tesserae/model/rotary.h"
#include "tesserae/tensor/mlp.h"

namespace tesserae::model {

/// Causal self-attention with rotary positions and grouped queries (Ainslie et al., 2023, arXiv:2305.13245).
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary);
  /// x [batch, time, dimension]. `sequence`: if it is cut over ranks; time is then this rank's positions, and what may
  /// follow them is padding.
  at::Tensor forward(const at::Tensor& x, const context::SequencePtr& sequence);

 private:
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  at::Tensor attend_across(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const context::SequencePtr& sequence) const;

  tensor::LayerOptions options_;
  tensor::Heads heads_;  // of this rank
  int64_t head_dimension_;
  std::shared_ptr<Rotary> rotary_;
  tensor::ColumnLinear query_{nullptr}, key_{nullptr}, value_{nullptr};
  tensor::RowLinear output_{nullptr};
};
TORCH_MODULE(Attention);

/// What layers of the transformer have in common: x + attention(norm(x)), then the norm before something else.
class AttentionBlock : public torch::nn::Module {
 protected:
  AttentionBlock(const GptConfig& config, std::shared_ptr<Rotary> rotary);
  at::Tensor attended(const at::Tensor& x, const context::SequencePtr& sequence);
  at::Tensor drop(const at::Tensor& branch) const;

  GptConfig config_;  // resolved
  tensor::LayerOptions options_;
  tensor::RmsNorm attention_norm_{nullptr}, feed_forward_norm_{nullptr};
  Attention attention_{nullptr};
};

/// One layer of the transformer: x + attention(norm(x)), then x + feed_forward(norm(x)).
class BlockImpl : public AttentionBlock {
 public:
  /// Blocks of one model share `rotary`; without one, the block makes its own.
  explicit BlockImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary = nullptr);
  /// [batch, time, dimension]; of time, this rank's piece if the model is sequence-parallel.
  /// `sequence`: if it is cut over context-parallel ranks.
  at::Tensor forward(at::Tensor x, const context::SequencePtr& sequence = nullptr);

 private:
  tensor::Mlp feed_forward_{nullptr};  // SwiGLU
};
TORCH_MODULE(Block);

/// The same with a mixture of experts in the place of the feed-forward layer.
class MixtureBlockImpl : public AttentionBlock {
 public:
  explicit MixtureBlockImpl(const GptConfig& config, std::shared_ptr<Rotary> rotary = nullptr);
  /// As Block's, and the router's losses: a scalar to be added to the loss.
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x, const context::SequencePtr& sequence = nullptr);

 private:
  experts::Moe feed_forward_{nullptr};
};
TORCH_MODULE(MixtureBlock);

}  // namespace tesserae::model
