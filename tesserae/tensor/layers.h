#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tesserae/tensor/functions.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::tensor {

// Layers that hold this rank's part of their tensors as parameters, without values: whoever builds the model fills them
// (fill_parameters), so that numbers do not depend on how many ranks there are. What the layers say of their
// parameters (SplitParameters) lets an engine, a checkpoint and an optimizer know the whole tensors.

/// What the layers of a model have in common.
struct LayerOptions {
  ParallelPtr parallel;  ///< among whom
  /// The dimension along which x and y of linear layers are split where they are not split by features, and x of norms;
  /// no_sequence: they are repeated.
  int64_t sequence_dim = no_sequence;
  c10::TensorOptions tensors = {};  ///< device and dtype of the parameters
};

/// y = x W^T + b, weight [out, in] and bias [out] cut by rows. y is split along its last dimension or, with
/// `gather_output`, repeated. If T does not divide `out`, the last parts end with padding, which gathering cuts off.
class ColumnLinearImpl : public torch::nn::Module, public SplitParameters {
 public:
  ColumnLinearImpl(int64_t in, int64_t out, const LayerOptions& options, bool bias = false, bool gather_output = false);
  at::Tensor forward(const at::Tensor& x) const;
  std::vector<SplitParameter> split_parameters() const override;

  at::Tensor weight;  ///< [ceil(out / T), in]
  at::Tensor bias;    ///< [ceil(out / T)] or undefined

 private:
  int64_t in_, out_;
  LayerOptions options_;
  bool gather_output_;
};
TORCH_MODULE(ColumnLinear);

/// y = x W^T + b for x that is split along its last dimension or, with `scatter_input`, repeated: weight [out, in] cut
/// by columns, bias [out] whole. Throws InvalidArgument, naming the degrees that would do, if T does not divide `in`.
class RowLinearImpl : public torch::nn::Module, public SplitParameters {
 public:
  RowLinearImpl(int64_t in, int64_t out, const LayerOptions& options, bool bias = false, bool scatter_input = false);
  at::Tensor forward(const at::Tensor& x) const;
  std::vector<SplitParameter> split_parameters() const override;

  at::Tensor weight;  ///< [out, in / T]
  at::Tensor bias;    ///< [out] or undefined

 private:
  int64_t in_, out_;
  LayerOptions options_;
  bool scatter_input_;
};
TORCH_MODULE(RowLinear);

/// A row of the table [vocabulary, dimension] for each token; the table is cut by rows, the last parts with padding.
class VocabularyEmbeddingImpl : public torch::nn::Module, public SplitParameters {
 public:
  VocabularyEmbeddingImpl(int64_t vocabulary, int64_t dimension, const LayerOptions& options);
  at::Tensor forward(const at::Tensor& tokens, const autograd::TiedGradientPtr& tied = {}) const;
  std::vector<SplitParameter> split_parameters() const override;

  at::Tensor weight;  ///< [ceil(vocabulary / T), dimension]

 private:
  int64_t vocabulary_, dimension_;
  LayerOptions options_;
};
TORCH_MODULE(VocabularyEmbedding);

/// x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, 2019, arXiv:1910.07467). The weight is whole on all
/// ranks. Where x is split along the sequence, each rank sees a part of the tokens, so the weight's gradient is summed
/// over the ranks.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dimension, double epsilon, const LayerOptions& options);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight;  ///< [dimension]

 private:
  double epsilon_;
  LayerOptions options_;
};
TORCH_MODULE(RmsNorm);

/// (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias (Ba, Kiros and Hinton, 2016, arXiv:1607.06450), both whole on
/// all ranks; their gradients as that of RmsNorm's weight.
class LayerNormImpl : public torch::nn::Module {
 public:
  LayerNormImpl(int64_t dimension, double epsilon, const LayerOptions& options);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight, bias;  ///< [dimension]

 private:
  double epsilon_;
  LayerOptions options_;
};
TORCH_MODULE(LayerNorm);

/// How many heads of an attention layer each rank has. Query heads are cut in T equal runs, and so are the heads of
/// keys and values, so that rank t has the keys and values that its queries use. Throws InvalidArgument, naming the
/// degrees that would do (the common divisors), unless T divides both: heads of keys and values are not repeated, since
/// repeated parameters would have different gradients.
struct Heads {
  int64_t query = 0;
  int64_t key_value = 0;
};
Heads heads_of_rank(int64_t query, int64_t key_value, const Parallel& parallel);

/// `size`, if T divides it. Throws InvalidArgument naming `what` and the degrees that would do.
int64_t size_of_part(const char* what, int64_t size, const Parallel& parallel);

}  // namespace tesserae::tensor
