#include "tesserae/tensor/layers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "tesserae/base/error.h"

namespace tesserae::tensor {
namespace {

std::string divisors_of(int64_t number) {
  std::string list;
  for (int64_t divisor = 1; divisor <= std::min<int64_t>(number, 1024); ++divisor) {
    if (number % divisor == 0) list += cat(list.empty() ? "" : ", ", divisor);
  }
  return list;
}

at::Tensor part(const std::vector<int64_t>& whole, const mesh::Split& split, const LayerOptions& options) {
  return at::empty(mesh::part_shape(whole, split), options.tensors);
}

/// Where a rank sees a part of the tokens, the gradient is summed over the ranks.
at::Tensor for_all_tokens(const at::Tensor& parameter, const LayerOptions& options) {
  return options.sequence_dim == no_sequence ? parameter : copy_to_parallel(parameter, options.parallel);
}

}  // namespace

int64_t size_of_part(const char* what, int64_t size, const Parallel& parallel) {
  if (size % parallel.size() == 0) return size / parallel.size();
  throw InvalidArgument("tensor parallelism", cat(what, " ", size, " cannot be cut for a tensor-parallel degree of ",
                                                  parallel.size(), "; degrees that would do: ", divisors_of(size)));
}

Heads heads_of_rank(int64_t query, int64_t key_value, const Parallel& parallel) {
  const int64_t ranks = parallel.size();
  if (query % ranks == 0 && key_value % ranks == 0) return {query / ranks, key_value / ranks};
  throw InvalidArgument(
      "tensor parallelism",
      cat("heads ", query, " and kv_heads ", key_value, " cannot be cut for a tensor-parallel degree of ", ranks,
          ", which must divide both; degrees that would do: ", divisors_of(std::gcd(query, key_value))));
}

ColumnLinearImpl::ColumnLinearImpl(int64_t in, int64_t out, const LayerOptions& options, bool with_bias,
                                   bool gather_output)
    : in_(in), out_(out), options_(options), gather_output_(gather_output) {
  const mesh::Split split = options_.parallel->split(0);
  weight = register_parameter("weight", part({out, in}, split, options_));
  if (with_bias) bias = register_parameter("bias", part({out}, split, options_));
}

at::Tensor ColumnLinearImpl::forward(const at::Tensor& x) const {
  const at::Tensor y = column_linear(x, weight, bias, options_.parallel, options_.sequence_dim);
  return gather_output_ ? gather_from(y, -1, options_.parallel).narrow(-1, 0, out_) : y;
}

std::vector<SplitParameter> ColumnLinearImpl::split_parameters() const {
  const mesh::Split split = options_.parallel->split(0);
  return {{"weight", split, {out_, in_}}, {"bias", split, {out_}}};
}

RowLinearImpl::RowLinearImpl(int64_t in, int64_t out, const LayerOptions& options, bool with_bias, bool scatter_input)
    : in_(in), out_(out), options_(options), scatter_input_(scatter_input) {
  size_of_part("the input width", in, *options_.parallel);
  weight = register_parameter("weight", part({out, in}, options_.parallel->split(1), options_));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options_.tensors));
}

at::Tensor RowLinearImpl::forward(const at::Tensor& x) const {
  const at::Tensor own = scatter_input_ ? scatter_to(x, -1, options_.parallel) : x;
  return row_linear(own, weight, bias, options_.parallel, options_.sequence_dim);
}

std::vector<SplitParameter> RowLinearImpl::split_parameters() const {
  return {{"weight", options_.parallel->split(1), {out_, in_}}};
}

VocabularyEmbeddingImpl::VocabularyEmbeddingImpl(int64_t vocabulary, int64_t dimension, const LayerOptions& options)
    : vocabulary_(vocabulary), dimension_(dimension), options_(options) {
  weight = register_parameter("weight", part({vocabulary, dimension}, options_.parallel->split(0), options_));
}

at::Tensor VocabularyEmbeddingImpl::forward(const at::Tensor& tokens, const autograd::TiedGradientPtr& tied) const {
  // What the function refuses, said better where that costs no synchronisation.
  if (tokens.device().is_cpu() && tokens.numel() > 0 && tokens.max().item<int64_t>() >= vocabulary_) {
    throw InvalidArgument("VocabularyEmbedding", cat("a token is ", tokens.max().item<int64_t>(),
                                                     "; it must be below the vocabulary, ", vocabulary_));
  }
  return vocabulary_embedding(tokens, weight, options_.parallel, vocabulary_, options_.sequence_dim, tied);
}

std::vector<SplitParameter> VocabularyEmbeddingImpl::split_parameters() const {
  return {{"weight", options_.parallel->split(0), {vocabulary_, dimension_}}};
}

RmsNormImpl::RmsNormImpl(int64_t dimension, double epsilon, const LayerOptions& options)
    : epsilon_(epsilon), options_(options) {
  weight = register_parameter("weight", at::empty({dimension}, options_.tensors));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) const {
  return at::rms_norm(x, weight.sizes(), for_all_tokens(weight, options_), epsilon_);
}

LayerNormImpl::LayerNormImpl(int64_t dimension, double epsilon, const LayerOptions& options)
    : epsilon_(epsilon), options_(options) {
  weight = register_parameter("weight", at::empty({dimension}, options_.tensors));
  bias = register_parameter("bias", at::empty({dimension}, options_.tensors));
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) const {
  return at::layer_norm(x, weight.sizes(), for_all_tokens(weight, options_), for_all_tokens(bias, options_), epsilon_);
}

}  // namespace tesserae::tensor
