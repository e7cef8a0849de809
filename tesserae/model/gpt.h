#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "tesserae/model/block.h"
#include "tesserae/shard/unit.h"

namespace tesserae::model {

/// A decoder transformer. Parameters are named embedding.weight, blocks.N.{attention_norm,feed_forward_norm}.weight,
/// blocks.N.attention.{query,key,value,output}.weight, blocks.N.feed_forward.{gate,up,down}.weight, norm.weight, and
/// head.weight unless the head is tied. With experts: blocks.N.feed_forward.router.weight, .experts.{gate,up,down} and
/// .shared.{gate,up,down}.weight.
class GptImpl : public torch::nn::Module {
 public:
  /// Parameters take their initial values (config.seed), unless they are made on the meta device. Throws
  /// InvalidArgument.
  explicit GptImpl(const GptConfig& config);

  /// The logits [batch, time, vocabulary] for tokens [batch, time] (int64). With `targets` of the same shape: the mean
  /// cross entropy in nats a token, in fp32; targets of -100 do not count. Throws InvalidArgument for a sequence longer
  /// than config.max_sequence. With tensor- or context-parallel ranks, all of them pass the same and get the same;
  /// gradients are then to be averaged over the context ranks, as shard_model over mesh::axes::state does. In training
  /// the losses of routers are added: to each of the ranks that read different tokens its part, of which the mean
  /// counts.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets = {});

  /// Recomputes the activations of every block in backward instead of keeping them.
  void checkpoint_activations_of_blocks(bool on = true);

  const GptConfig& config() const { return config_; }  ///< resolved

 private:
  context::SequencePtr sequence_of(const at::Tensor& tokens, int64_t row) const;
  at::Tensor forward_rows(const at::Tensor& tokens, const at::Tensor& targets, int64_t row);
  std::pair<at::Tensor, at::Tensor> forward_padded(const at::Tensor& tokens, const at::Tensor& targets,
                                                   const context::SequencePtr& sequence);

  GptConfig config_;
  tensor::LayerOptions options_;
  tensor::VocabularyEmbedding embedding_{nullptr};
  std::vector<shard::Unit<BlockImpl>> blocks_;
  std::vector<shard::Unit<MixtureBlockImpl>> mixtures_;  // in their place, if there are experts
  tensor::RmsNorm norm_{nullptr};
  // Empty if tied. A unit: its gradient is there first in backward and its values are needed last in forward, while
  // the root's embedding is the other way around.
  shard::Unit<tensor::ColumnLinear> head_{nullptr};
};

/// The root is a unit, too: embedding and last norm are gathered together.
using Gpt = shard::Unit<GptImpl>;

}  // namespace tesserae::model
