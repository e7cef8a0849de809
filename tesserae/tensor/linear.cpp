// Linear layers whose weights are split: column and row are each other's transpose, and read side by side. What each
// rank sends, and what it computes meanwhile:
//
//  column, forward    gathers x if it is split along the sequence; multiplies its own piece, then each that has come
//  column, backward   gathers x again; computes the gradient of x; sums it while the gradients of the weights follow
//  row, forward       multiplies piece by piece; each is summed while the next is multiplied
//  row, backward      gathers the gradient if it is split along the sequence; its own piece first
//
// Tokens are rows of matrices [rows, width] here. Where they are split along the sequence, a whole tensor is
// [T, rows, width]: pieces in the order of the ranks, whatever dimension the sequence is; matrices do not mind the
// order of tokens, so only what is returned is put in the order of the caller.

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "tesserae/tensor/exchange.h"
#include "tesserae/tensor/node.h"
#include "tesserae/tensor/product.h"
#include "tesserae/tensor/rows.h"

namespace tesserae::tensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor whole_rows(const at::Tensor& pieces) {
  return pieces.view({-1, pieces.size(-1)});
}

// pieces[t] = f(t) for all t but `own`, as two products of neighbours.
void multiply_others(const at::Tensor& out, const at::Tensor& pieces, const at::Tensor& matrix, int64_t own) {
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, own}, {own + 1, pieces.size(0)}}) {
    if (begin == end) continue;
    product_to(whole_rows(out.narrow(0, begin, end - begin)), whole_rows(pieces.narrow(0, begin, end - begin)), matrix);
  }
}

// How a tensor of so many bytes and rows is cut to be sent: the same on all ranks.
int64_t pieces_of(const Parallel& parallel, int64_t bytes, int64_t rows) {
  constexpr int64_t most = 8;
  if (parallel.size() == 1) return 1;
  return std::clamp<int64_t>(bytes / parallel.piece_bytes, 1, std::max<int64_t>(1, std::min(most, rows)));
}

void check_width(const char* function, const at::Tensor& x, const at::Tensor& weight) {
  if (weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1)) return;
  throw InvalidArgument(function, cat("x of shape ", x.sizes(), " and a weight part of shape ", weight.sizes(),
                                      " cannot be multiplied: the last dimensions must be equal"));
}

int64_t sequence_of(const char* function, const at::Tensor& x, int64_t dim) {
  if (dim == no_sequence) return dim;
  if (dim >= 0 && dim < x.dim() - 1) return dim;
  throw InvalidArgument(function, cat("the sequence of x of shape ", x.sizes(), " cannot be dimension ", dim));
}

// What torch.autocast does to the arguments of linear layers: to nodes of ours it does nothing.
at::Tensor autocast(const at::Tensor& x, const at::Tensor& like) {
  const at::DeviceType device = like.device().type();
  if (!at::autocast::is_autocast_enabled(device) || !x.defined() || !x.is_floating_point()) return x;
  return x.to(at::autocast::get_autocast_dtype(device));
}

// --- column ----------------------------------------------------------------------------------------------------------

// All y_i [T, rows, out_i] for x [rows, in], this rank's piece of the tokens.
variable_list multiply_gathered(const at::Tensor& own, at::TensorList weights, const Parallel& parallel) {
  const int64_t ranks = parallel.size(), rows = own.size(0), index = parallel.index();
  const int64_t count = pieces_of(parallel, static_cast<int64_t>(own.nbytes()) * ranks, rows);
  std::vector<Pending> gathers;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = rows * i / count, end = rows * (i + 1) / count;
    gathers.push_back(start_gather(own.narrow(0, begin, end - begin), parallel));
  }
  variable_list results;
  for (const auto& weight : weights) {
    results.push_back(at::empty({ranks, rows, weight.size(0)}, own.options()));
    product_to(results.back()[index], own, weight.t());
  }
  for (int64_t i = 0, begin = 0; i < count; ++i) {
    gathers[static_cast<size_t>(i)].ticket.wait();
    const at::Tensor& pieces = gathers[static_cast<size_t>(i)].tensor;
    for (size_t w = 0; w < weights.size(); ++w) {
      if (count == 1) {
        multiply_others(results[w], pieces, weights[w].t(), index);
        continue;
      }
      for (int64_t rank = 0; rank < ranks; ++rank) {
        if (rank == index) continue;
        product_to(results[w][rank].narrow(0, begin, pieces.size(1)), pieces[rank], weights[w].t());
      }
    }
    begin += pieces.size(1);
  }
  return results;
}

// Inputs: x, the weights, the biases (all or none).
struct ColumnLinearFunction : torch::autograd::Function<ColumnLinearFunction> {
  static variable_list forward(AutogradContext* context, const ParallelPtr& parallel, int64_t sequence, int64_t count,
                               at::TensorList inputs) {
    keep(context, parallel, sequence);
    context->saved_data["biases"] = static_cast<int64_t>(inputs.size()) > 1 + count;
    const at::Tensor& x = inputs[0];
    const at::TensorList weights = inputs.slice(1, static_cast<size_t>(count));
    const at::TensorList biases = inputs.slice(1 + static_cast<size_t>(count));
    context->save_for_backward(inputs.slice(0, 1 + static_cast<size_t>(count)).vec());

    const at::AutoDispatchBelowADInplaceOrView guard;  // results may be changed in place: they are nobody's views
    variable_list results;
    if (sequence == no_sequence) {
      const at::Tensor rows = rows_of(x);
      for (const auto& weight : weights) {
        results.push_back(product(rows, weight.t()).view(shape_with(x, weight.size(0))));
      }
    } else {
      results = multiply_gathered(rows_of(x), weights, *parallel);
      for (auto& y : results) {
        std::vector<int64_t> shape = shape_with(x, y.size(-1));
        shape.insert(shape.begin(), parallel->size());
        y = from_pieces(y.view(shape), sequence);
      }
    }
    for (size_t i = 0; i < biases.size(); ++i) results[i].add_(biases[i]);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto how = kept(context);
    const Parallel& parallel = *how->parallel;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& x = saved[0];
    const size_t count = saved.size() - 1;
    const bool sequence = how->dim != no_sequence;
    const auto needed = [&](size_t input) { return context->needs_input_grad(input); };

    Pending whole_x{rows_of(x), {}};
    const bool any_weight = context->needs_input_grad({{1, 1 + count}});
    if (sequence && any_weight) whole_x = start_gather(rows_of(x), parallel);

    variable_list dy;
    for (const auto& gradient : gradients) {
      dy.push_back(rows_of(sequence ? to_pieces(gradient, how->dim, parallel) : gradient));
    }
    Pending dx;
    if (needed(0)) {
      const at::Tensor partial = product(dy[0], saved[1]);
      for (size_t i = 1; i < count; ++i) add_product(partial, dy[i], saved[1 + i]);
      if (sequence) {
        dx = start_reduce_scatter(partial.view({parallel.size(), -1, partial.size(1)}), parallel);
      } else {
        dx = {partial, start_sum(partial, parallel)};
      }
    }
    whole_x.ticket.wait();
    variable_list result(4 + count);  // three that are no tensors, x, the weights
    for (size_t i = 0; i < count; ++i) {
      if (!needed(1 + i)) continue;
      result[4 + i] = weight_gradient(saved[1 + i], dy[i], sequence ? whole_rows(whole_x.tensor) : whole_x.tensor,
                                      Products::widened);
    }
    if (context->saved_data["biases"].toBool()) {
      for (size_t i = 0; i < count; ++i) {
        result.push_back(needed(1 + count + i) ? dy[i].sum(0) : at::Tensor());
      }
    }
    dx.ticket.wait();
    if (needed(0)) result[3] = dx.tensor.view(x.sizes());
    return result;
  }
};

// --- row -------------------------------------------------------------------------------------------------------------

// Inputs: x, the weight, the bias or nothing.
struct RowLinearFunction : torch::autograd::Function<RowLinearFunction> {
  static at::Tensor forward(AutogradContext* context, const ParallelPtr& parallel, int64_t sequence,
                            at::TensorList inputs) {
    keep(context, parallel, sequence);
    const at::Tensor &x = inputs[0], &weight = inputs[1];
    context->save_for_backward({x, weight});
    context->saved_data["biases"] = inputs.size() > 2;
    const at::AutoDispatchBelowADInplaceOrView guard;  // as above
    at::Tensor y = sequence == no_sequence ? sum_by_pieces(x, weight, *parallel)
                                           : scatter_by_pieces(x, weight, sequence, *parallel);
    if (inputs.size() > 2) y.add_(inputs[2]);
    return y;
  }

  static at::Tensor sum_by_pieces(const at::Tensor& x, const at::Tensor& weight, const Parallel& parallel) {
    const at::Tensor from = rows_of(x);
    const int64_t rows = from.size(0);
    const at::Tensor y = at::empty({rows, weight.size(0)}, x.options());
    const int64_t count = pieces_of(parallel, static_cast<int64_t>(y.nbytes()), rows);
    std::vector<comm::Ticket> sums;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = rows * i / count, end = rows * (i + 1) / count;
      const at::Tensor piece = y.narrow(0, begin, end - begin);
      product_to(piece, from.narrow(0, begin, end - begin), weight.t());
      sums.push_back(start_sum(piece, parallel));
    }
    for (const auto& sum : sums) sum.wait();
    return y.view(shape_with(x, weight.size(0)));
  }

  static at::Tensor scatter_by_pieces(const at::Tensor& x, const at::Tensor& weight, int64_t sequence,
                                      const Parallel& parallel) {
    const at::Tensor pieces = to_pieces(x, sequence, parallel);
    const int64_t ranks = parallel.size(), out = weight.size(0);
    const at::Tensor from = pieces.view({ranks, -1, x.size(-1)});
    const int64_t rows = from.size(1);
    const int64_t count = pieces_of(parallel, rows * ranks * out * x.element_size(), rows);
    std::vector<Pending> sums;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = rows * i / count, end = rows * (i + 1) / count;
      const at::Tensor partial = at::empty({ranks, end - begin, out}, x.options());
      for (int64_t rank = 0; rank < ranks; ++rank) {
        product_to(partial[rank], from[rank].narrow(0, begin, end - begin), weight.t());
      }
      sums.push_back(start_reduce_scatter(partial, parallel));
    }
    std::vector<at::Tensor> parts;
    for (const auto& sum : sums) {
      sum.ticket.wait();
      parts.push_back(sum.tensor);
    }
    return (parts.size() == 1 ? parts[0] : at::cat(parts)).view(shape_with(pieces[0], out));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto how = kept(context);
    const Parallel& parallel = *how->parallel;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const auto needed = [&](size_t input) { return context->needs_input_grad(input); };
    variable_list result(4);

    at::Tensor dy = rows_of(gradients[0]), from;
    if (how->dim == no_sequence) {
      if (needed(0)) result[2] = product(dy, weight).view(x.sizes());
      from = rows_of(x);
    } else {
      const Pending gather = start_gather(dy, parallel);
      at::Tensor dx;
      if (needed(0)) {
        dx = at::empty({parallel.size(), dy.size(0), weight.size(1)}, dy.options());
        product_to(dx[parallel.index()], dy, weight);
      }
      if (needed(1)) from = rows_of(to_pieces(x, how->dim, parallel));
      gather.ticket.wait();
      if (needed(0)) {
        multiply_others(dx, gather.tensor, weight, parallel.index());
        std::vector<int64_t> shape = x.sizes().vec();
        shape[static_cast<size_t>(how->dim)] /= parallel.size();
        shape.insert(shape.begin(), parallel.size());
        result[2] = from_pieces(dx.view(shape), how->dim);
      }
      dy = whole_rows(gather.tensor);
    }
    if (needed(1)) result[3] = weight_gradient(weight, dy, from, Products::widened);
    // Every rank adds up the same numbers in the same order: the gradient of the bias is repeated.
    if (context->saved_data["biases"].toBool()) result.push_back(needed(2) ? dy.sum(0) : at::Tensor());
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> column_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                      const std::vector<at::Tensor>& biases, const ParallelPtr& parallel,
                                      int64_t sequence_dim) {
  if (weights.empty() || (!biases.empty() && biases.size() != weights.size())) {
    throw InvalidArgument("column_linear", cat(weights.size(), " weights with ", biases.size(), " biases"));
  }
  for (const auto& weight : weights) check_width("column_linear", x, weight);
  std::vector<at::Tensor> inputs{autocast(x, x)};
  for (const auto* list : {&weights, &biases}) {
    for (const auto& tensor : *list) inputs.push_back(autocast(tensor, x));
  }
  return ColumnLinearFunction::apply(parallel, sequence_of("column_linear", x, sequence_dim),
                                     static_cast<int64_t>(weights.size()), at::TensorList(inputs));
}

at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const ParallelPtr& parallel, int64_t sequence_dim) {
  const auto biases = bias.defined() ? std::vector<at::Tensor>{bias} : std::vector<at::Tensor>{};
  return column_linear(x, std::vector<at::Tensor>{weight}, biases, parallel, sequence_dim)[0];
}

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const ParallelPtr& parallel, int64_t sequence_dim) {
  check_width("row_linear", x, weight);
  const int64_t dim = sequence_of("row_linear", x, sequence_dim);
  if (dim != no_sequence) cut_dimension_of("row_linear", x, dim, *parallel);
  std::vector<at::Tensor> inputs{autocast(x, x), autocast(weight, x)};
  if (bias.defined()) inputs.push_back(autocast(bias, x));
  return RowLinearFunction::apply(parallel, dim, at::TensorList(inputs));
}

}  // namespace tesserae::tensor
