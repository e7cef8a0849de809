#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "tesserae/model/config.h"

namespace tesserae::model {

// The layers below hold one parameter, "weight", which they leave without values (see init.h): torch's own layers draw
// random numbers in their constructors, in an order that depends on how the model is built.

/// y = x W^T.
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(int64_t in, int64_t out, const GptConfig& config);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight;  ///< [out, in]
};
TORCH_MODULE(Linear);

/// A row of `weight` for each token.
class EmbeddingImpl : public torch::nn::Module {
 public:
  explicit EmbeddingImpl(const GptConfig& config);
  at::Tensor forward(const at::Tensor& tokens) const;
  at::Tensor weight;  ///< [vocabulary, dimension]
};
TORCH_MODULE(Embedding);

/// x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467).
class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(const GptConfig& config);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight;  ///< [dimension]

 private:
  double epsilon_;
};
TORCH_MODULE(RmsNorm);

}  // namespace tesserae::model
