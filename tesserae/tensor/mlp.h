#pragma once

#include <cstdint>

#include "tesserae/tensor/layers.h"

namespace tesserae::tensor {

enum class Activation {
  relu,
  silu,
  gelu,       ///< x Phi(x) (Hendrycks and Gimpel, 2016, arXiv:1606.08415)
  gelu_tanh,  ///< its approximation by tanh: GPT-2's, T5 1.1's
};

/// The feed-forward layers of the field, by their parts.
struct MlpOptions {
  int64_t width = 0;   ///< of x and y
  int64_t hidden = 0;  ///< T divides it
  Activation activation = Activation::gelu;
  bool gated = false;  ///< a second column layer is multiplied in
  bool bias = false;
};

/// down(activation(up(x))) or, gated (Shazeer, 2020, arXiv:2002.05202), down(activation(gate(x)) * up(x)):
///  - GPT-2 and GPT-NeoX: gelu_tanh or gelu with biases; T5: relu; T5 1.1: gelu_tanh, gated; Llama (SwiGLU): silu,
///  gated.
/// x and y [..., width] are repeated or, sequence-parallel, split (LayerOptions); the hidden layer is split by
/// features. One sum over the ranks in forward, one in backward. Throws InvalidArgument, naming the degrees that would
/// do, if T does not divide `hidden`.
class MlpImpl : public torch::nn::Module {
 public:
  MlpImpl(const MlpOptions& mlp, const LayerOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  Activation activation_;
  LayerOptions options_;
  ColumnLinear gate_{nullptr}, up_{nullptr};  ///< gate: if gated
  RowLinear down_{nullptr};
};
TORCH_MODULE(Mlp);

}  // namespace tesserae::tensor
