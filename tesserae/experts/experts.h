#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "tesserae/tensor/layers.h"

namespace tesserae::experts {

struct ExpertsOptions {
  int64_t experts = 0;  ///< in all; E divides them
  int64_t width = 0;    ///< of x and y
  int64_t hidden = 0;   ///< of each expert; T divides it
};

/// The experts of this rank: down_g(silu(gate_g(x)) * up_g(x)) (SwiGLU: Shazeer, 2020, arXiv:2002.05202) for the rows
/// of each. Their matrices are stacked and split twice: by experts over the expert axis, and by the hidden layer over
/// the tensor-parallel ranks. What they hold is sharded over the ranks that hold the same experts (mesh::state_axes),
/// so the module is a unit of its own: shard::Unit<Experts>. Nothing is sent here.
class ExpertsImpl : public torch::nn::Module, public tensor::SplitParameters {
 public:
  /// Throws InvalidArgument, naming the degrees that would do, unless E and T divide their sizes.
  ExpertsImpl(const ExpertsOptions& options, const tensor::LayerOptions& layer);

  /// y [rows, width] for x [rows, width], the rows of each expert one after the other; `counts` [experts of this rank]
  /// int64 on the host: how many each has. With tensor parallelism y is partial: the sum over the ranks is the
  /// caller's, best once the rows of a token have been added up (tensor::reduce_from).
  at::Tensor forward(const at::Tensor& x, const at::Tensor& counts) const;
  std::vector<tensor::SplitParameter> split_parameters() const override;

  at::Tensor gate, up;  ///< [experts / E, hidden / T, width]
  at::Tensor down;      ///< [experts / E, width, hidden / T]

 private:
  mesh::Splits split(int hidden_dim) const;

  ExpertsOptions options_;
  tensor::LayerOptions layer_;
};
TORCH_MODULE(Experts);

}  // namespace tesserae::experts
