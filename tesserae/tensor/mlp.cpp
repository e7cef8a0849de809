#include "tesserae/tensor/mlp.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include <vector>

namespace tesserae::tensor {
namespace {

at::Tensor activated(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::relu:
      return at::relu(x);
    case Activation::silu:
      return at::silu(x);
    case Activation::gelu:
      return at::gelu(x);
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
  }
  return x;
}

}  // namespace

MlpImpl::MlpImpl(const MlpOptions& mlp, const LayerOptions& options) : activation_(mlp.activation), options_(options) {
  size_of_part("the hidden width", mlp.hidden, *options.parallel);  // padded features would be multiplied in vain
  const auto column = [&] { return ColumnLinear(mlp.width, mlp.hidden, options, mlp.bias); };
  if (mlp.gated) gate_ = register_module("gate", column());
  up_ = register_module("up", column());
  down_ = register_module("down", RowLinear(mlp.hidden, mlp.width, options, mlp.bias));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  if (!gate_) return down_(activated(activation_, up_(x)));
  std::vector<at::Tensor> biases;
  if (up_->bias.defined()) biases = {gate_->bias, up_->bias};
  const auto both =
      column_linear(x, {gate_->weight, up_->weight}, biases, options_.parallel, options_.sequence_dim);  // x once
  return down_(activated(activation_, both[0]).mul(both[1]));
}

}  // namespace tesserae::tensor
