#include "tesserae/tensor/functions.h"

#include "tesserae/tensor/exchange.h"
#include "tesserae/tensor/node.h"
#include "tesserae/tensor/unsplit.h"

namespace tesserae::tensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a function does to a tensor: nothing, sum, put together, cut, or sum and cut.
using Verb = at::Tensor (*)(const at::Tensor& x, int64_t dim, const Parallel& parallel);

at::Tensor same(const at::Tensor& x, int64_t, const Parallel&) {
  return x;
}
at::Tensor sum(const at::Tensor& x, int64_t, const Parallel& parallel) {
  return summed(x, parallel);
}

// Each function is a pair of verbs: that of forward, and its adjoint.
template <Verb forward_verb, Verb backward_verb>
struct Pair : torch::autograd::Function<Pair<forward_verb, backward_verb>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t dim, const ParallelPtr& parallel) {
    keep(context, parallel, dim);
    return forward_verb(x, dim, *parallel);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto how = kept(context);
    return {backward_verb(gradients[0], how->dim, *how->parallel), {}, {}};
  }
};

}  // namespace

at::Tensor copy_to_parallel(const at::Tensor& x, const ParallelPtr& parallel) {
  return Pair<same, sum>::apply(x, int64_t{0}, parallel);
}

at::Tensor reduce_from(const at::Tensor& x, const ParallelPtr& parallel) {
  return Pair<sum, same>::apply(x, int64_t{0}, parallel);
}

at::Tensor gather_from(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel) {
  return Pair<put_together, own_piece>::apply(x, dimension_of("gather_from", x, dim), parallel);
}

at::Tensor scatter_to(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel) {
  return Pair<own_piece, put_together>::apply(x, cut_dimension_of("scatter_to", x, dim, *parallel), parallel);
}

at::Tensor gather_sequence(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel) {
  return Pair<put_together, summed_piece>::apply(x, dimension_of("gather_sequence", x, dim), parallel);
}

at::Tensor reduce_scatter_sequence(const at::Tensor& x, int64_t dim, const ParallelPtr& parallel) {
  const int64_t along = cut_dimension_of("reduce_scatter_sequence", x, dim, *parallel);
  return Pair<summed_piece, put_together>::apply(x, along, parallel);
}

at::Tensor vocabulary_embedding(const at::Tensor& tokens, const at::Tensor& weight, const ParallelPtr& parallel,
                                int64_t vocabulary, int64_t sequence_dim, const autograd::TiedGradientPtr& tied) {
  // One rank has the row of a token; the others bring zeros. A token that nobody has is left for at::embedding to
  // refuse, on all ranks; also one whose row is padding, which is never saved.
  const int64_t rows = weight.size(0);
  const at::Tensor known = tokens.ge(0).logical_and_(tokens.lt(vocabulary));
  const at::Tensor local = tokens.sub(parallel->index() * rows).masked_fill(known.logical_not(), rows);
  const at::Tensor foreign = local.lt(0).logical_or_(local.ge(rows)).logical_and_(known);
  const at::Tensor found = unsplit_embedding(local.masked_fill(foreign, 0), weight, /*padding_index=*/-1, tied)
                               .masked_fill(foreign.unsqueeze(-1), 0);
  return sequence_dim == no_sequence ? reduce_from(found, parallel)
                                     : reduce_scatter_sequence(found, sequence_dim, parallel);
}

}  // namespace tesserae::tensor
