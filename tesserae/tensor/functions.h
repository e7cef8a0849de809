#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tesserae/autograd/tied_gradient.h"
#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

// Differentiable functions on tensors that are split, or repeated, over the ranks of a Parallel (T ranks; this one has
// index t). All ranks call them in the same order with equal shapes, on the thread that computes, and run the same
// backward; see [Note: order of collectives]. With one rank nothing is sent and nothing is copied.
//
// A *repeated* tensor has the same values on all ranks, to the bit; its gradient too. A *split* tensor is cut along a
// dimension: rank t has the t-th of T equal pieces. A *partial* tensor is the sum over the ranks of what they have.
// First derivatives only. Errors: InvalidArgument for shapes that cannot be; comm::CommError.

using ParallelPtr = std::shared_ptr<const Parallel>;

/// The same tensor; its gradients, which are partial, are summed. Where a repeated tensor enters split computation.
at::Tensor copy_to_parallel(const at::Tensor& x, const ParallelPtr& parallel);

/// Sums a partial tensor: the result is repeated. The gradient stays as it is.
at::Tensor reduce_from(const at::Tensor& x, const ParallelPtr& parallel);

/// Puts the pieces along `dim` together: the result is repeated. Of the gradient, which is repeated, the own piece.
at::Tensor gather_from(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel);

/// The own piece of a repeated tensor; the gradient is put together.
at::Tensor scatter_to(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel);

/// Sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198): between the linear layers of a model, where each
/// token is worked on by itself, the tensors are split along the sequence, `dim`.
///  - gather_sequence: puts the pieces together, for split computation; the gradient, which is partial, is summed and
///    cut. In place of copy_to_parallel.
///  - reduce_scatter_sequence: sums a partial tensor and keeps the own piece; the gradient is put together. In place of
///    reduce_from.
at::Tensor gather_sequence(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel);
at::Tensor reduce_scatter_sequence(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel);

/// No sequence parallelism: x and y of linear layers are repeated.
inline constexpr int64_t no_sequence = -1;

/// y_i = x W_i^T + b_i for weights whose rows are split: W_i [out_i / T, in], b_i [out_i / T] or undefined (an empty
/// list: none). x [..., in] is repeated or, with `sequence_dim`, split along it; y_i [..., out_i / T] is split along
/// its last dimension, with all tokens.
///
/// One node for all weights that read the same x (query, key and value): x is gathered once, and not kept, but gathered
/// again in backward while the gradient of x is computed; that is summed while the gradients of the weights are.
std::vector<at::Tensor> column_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                      const std::vector<at::Tensor>& biases, const ParallelPtr& parallel,
                                      int64_t sequence_dim = no_sequence);
at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const ParallelPtr& parallel, int64_t sequence_dim = no_sequence);

/// y = x W^T + b for a weight whose columns are split: W [out, in / T], b [out] (repeated, added once) or undefined.
/// x [..., in / T] is split along its last dimension; y [..., out] is repeated or, with `sequence_dim`, split along it.
/// The sum over the ranks is formed piece by piece while the next piece is multiplied.
at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const ParallelPtr& parallel, int64_t sequence_dim = no_sequence);

/// The rows of a table [vocabulary, dimension] for `tokens` (int64, repeated), of which this rank has the rows from
/// t * R on: `weight` [R, dimension]; those from `vocabulary` on are padding, and no token's: at::embedding refuses it,
/// on all ranks. The result [..., dimension] is repeated or, with `sequence_dim`, split along it. `tied`: a later node
/// uses the weight, too.
at::Tensor vocabulary_embedding(const at::Tensor& tokens, const at::Tensor& weight, const ParallelPtr& parallel,
                                int64_t vocabulary, int64_t sequence_dim = no_sequence,
                                const autograd::TiedGradientPtr& tied = {});

/// The cross entropy in nats of each token, fp32, shape of `targets` [...] (int64, repeated); 0 where the target is
/// `ignored`. `logits` [..., R]: the columns from t * R on; those from `vocabulary` on are padding and do not count.
/// Logits are never gathered: what is sent are two sums and a maximum for each token. The result is repeated. Throws
/// InvalidArgument for targets outside [0, vocabulary), on all ranks.
at::Tensor vocabulary_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t vocabulary,
                                    const ParallelPtr& parallel, int64_t ignored = -100);

}  // namespace tesserae::tensor
