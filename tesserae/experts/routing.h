#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "tesserae/tensor/layers.h"

namespace tesserae::experts {

/// What logits are made into, before experts are chosen by it.
enum class Scores {
  softmax,  ///< over all experts (Switch, GShard, Mixtral)
  sigmoid,  ///< of each expert by itself (DeepSeek-V3, arXiv:2412.19437)
};

struct RoutingOptions {
  int64_t width = 0;    ///< of a token
  int64_t experts = 0;  ///< in all
  int64_t chosen = 1;   ///< k: experts of a token
  Scores scores = Scores::softmax;
  /// The k weights of a token are divided by their sum. With softmax that is the softmax of the k largest logits, which
  /// is what Mixtral does (arXiv:2401.04088).
  bool normalised = true;
  double scale = 1;  ///< weights are multiplied by it, after that

  /// Coefficient of the load-balancing loss of the Switch transformer (Fedus et al., 2021, arXiv:2101.03961):
  /// experts * sum over experts of (its share of all choices) * (its mean score, as a share); 1 where all are alike.
  double balance_loss = 0;
  /// Coefficient of the z-loss of ST-MoE (Zoph et al., 2022, arXiv:2202.08906): mean of logsumexp(logits)^2.
  double z_loss = 0;
  /// > 0: balance without a loss (Wang et al., 2024, arXiv:2408.15664). A bias of each expert is added to its score
  /// where experts are chosen, and nowhere else; update_biases() (balance.h) moves it by so much a step.
  double bias_rate = 0;
};

/// What a router decides about some tokens.
struct Routing {
  at::Tensor choice;   ///< [tokens, k] int64: experts, the best first; of equal scores the expert with the lower number
  at::Tensor weights;  ///< [tokens, k], fp32 at least; differentiable
  at::Tensor counts;   ///< [experts] int64: choices of each
  at::Tensor loss;     ///< to be added to the loss of the model: [], dtype of the weights; 0 outside training
};

/// Chooses the experts of each token. Its weight [experts, width] is whole on all ranks and belongs to the unit around
/// it; logits and all that follows are computed in fp32 at least. The same choice on all tensor-parallel ranks, to the
/// bit. Losses and biases are about all tokens of the step's batch on all ranks (axes::loss), so that they do not
/// depend on how many ranks share it.
class RouterImpl : public torch::nn::Module {
 public:
  /// `layer`: what the layers around have in common. Throws InvalidArgument naming what cannot be: k outside
  /// [1, experts], sizes below 1, negative coefficients.
  RouterImpl(const RoutingOptions& options, const tensor::LayerOptions& layer);

  /// The logits [..., experts] of x [..., width]: of this rank's tokens, if x is split along the sequence.
  at::Tensor forward(const at::Tensor& x) const;

  /// Chooses for all tokens of `logits` [tokens, experts], which are repeated on all tensor-parallel ranks. In
  /// training, collective over axes::loss if there is a loss.
  Routing route(const at::Tensor& logits);

  /// Moves the bias, if there is one, by bias_rate: up for experts that were chosen less often than the mean, down for
  /// those that were more often. `chosen` [experts]: by all ranks since the last call, up to a factor. Forgets this
  /// rank's. Between steps, by all ranks alike; see update_biases() and StepLoads.
  void update_bias(const at::Tensor& chosen);

  const RoutingOptions& options() const { return options_; }
  const tensor::ParallelPtr& parallel() const { return layer_.parallel; }

  at::Tensor weight;  ///< [experts, width]
  at::Tensor bias;    ///< buffer [experts], fp32; undefined unless bias_rate > 0
  /// [experts] int64: choices since the last update_bias(); undefined unless bias_rate > 0. Recomputed forwards do not
  /// count.
  at::Tensor chosen_since;

 private:
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& scores, const at::Tensor& counts) const;

  RoutingOptions options_;
  tensor::LayerOptions layer_;
};
TORCH_MODULE(Router);

}  // namespace tesserae::experts
