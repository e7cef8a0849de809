#include "tesserae/model/layers.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>

namespace tesserae::model {

namespace {

at::Tensor unset(at::IntArrayRef shape, const GptConfig& config) {
  return at::empty(shape, at::TensorOptions().device(config.device).dtype(config.dtype));
}

}  // namespace

LinearImpl::LinearImpl(int64_t in, int64_t out, const GptConfig& config) {
  weight = register_parameter("weight", unset({out, in}, config));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) const {
  return at::linear(x, weight);
}

EmbeddingImpl::EmbeddingImpl(const GptConfig& config) {
  weight = register_parameter("weight", unset({config.vocabulary, config.dimension}, config));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) const {
  return at::embedding(weight, tokens);
}

RmsNormImpl::RmsNormImpl(const GptConfig& config) : epsilon_(config.norm_epsilon) {
  weight = register_parameter("weight", unset({config.dimension}, config));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) const {
  return at::rms_norm(x, weight.sizes(), weight, epsilon_);
}

}  // namespace tesserae::model
