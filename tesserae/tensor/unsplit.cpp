#include "tesserae/tensor/unsplit.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tesserae/autograd/gradient_hooks.h"
#include "tesserae/tensor/rows.h"

namespace tesserae::tensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Nobody is to see the operators that a node of ours leaves out or calls otherwise.
bool unobserved(const at::Tensor& input, const at::Tensor& weight) {
  return !at::isTensorSubclassLike(input) && !at::isTensorSubclassLike(weight) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !at::tracer::impl::is_dispatch_enabled() &&
         !input._fw_grad(0).defined() && !weight._fw_grad(0).defined();
}

bool learns(const at::Tensor& weight) {
  return at::GradMode::is_enabled() && weight.is_leaf() && weight.requires_grad();
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, Products products) {
    context->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["widened"] = products == Products::widened;
    // The result may be a view: below autograd it counts as a tensor of its own, which may be changed in place.
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (products == Products::as_torch) return at::linear(x, weight, bias);
    at::Tensor y = product(rows_of(x), weight.t());
    if (bias) y.add_(*bias);
    return y.view(shape_with(x, weight.size(0)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    // Where gradients are to be differentiated again, only torch's own products are.
    const bool widened = context->saved_data["widened"].toBool() && !at::GradMode::is_enabled();
    const at::Tensor dy = rows_of(gradients[0]);
    variable_list result(4);
    if (context->needs_input_grad(0)) {
      const at::Tensor dx = widened ? product(dy, weight) : dy.mm(weight);
      result[0] = dx.view(shape_with(gradients[0], weight.size(1)));
    }
    if (context->needs_input_grad(1)) {
      result[1] = weight_gradient(weight, dy, rows_of(x), widened ? Products::widened : Products::as_torch);
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) result[2] = dy.sum(0);
    return result;
  }
};

// Adds to `table` the gradients `rows` [n, dimension] of the rows that `tokens` [n] name: first those of one token, so
// that what is rounded is what would be if there were nothing in the table yet. On a device the host would have to wait
// for the number of rows that are named.
void add_rows(const at::Tensor& table, const at::Tensor& tokens, const at::Tensor& rows, int64_t padding) {
  if (!table.is_cpu()) {
    table.add_(at::embedding_dense_backward(rows, tokens, table.size(0), padding, false));
    return;
  }
  const auto [named, place, counts] = at::_unique2(tokens, /*sorted=*/true, /*return_inverse=*/true);
  at::Tensor sums = at::embedding_dense_backward(rows, place, named.size(0), /*padding_idx=*/-1, false);
  if (padding >= 0) sums.masked_fill_(named.eq(padding).unsqueeze(-1), 0);
  table.index_add_(0, named, sums);
}

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& tokens,
                            int64_t padding_index, const autograd::TiedGradientPtr& tied) {
    context->save_for_backward({weight, tokens});
    context->saved_data["padding_index"] = padding_index;
    if (tied) {
      tied->expect_sum(weight);
      context->saved_data["tied"] = c10::IValue::make_capsule(tied);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return at::embedding(weight, tokens, padding_index);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &weight = saved[0], &tokens = saved[1];
    const int64_t padding = context->saved_data["padding_index"].toInt();
    if (const auto tied = context->saved_data.find("tied"); tied != context->saved_data.end()) {
      const auto of_both = c10::static_intrusive_pointer_cast<autograd::TiedGradient>(tied->second.toCapsule());
      if (at::Tensor sum = of_both->take(); sum.defined()) {
        add_rows(sum, tokens.flatten(), gradients[0].reshape({-1, weight.size(1)}), padding);
        return {sum, {}, {}, {}};
      }
    }
    // On a device the order of additions would be a matter of chance.
    at::Tensor destination = weight.is_cpu() ? autograd::gradient_destination(weight) : at::Tensor();
    if (!destination.defined()) {
      return {at::embedding_dense_backward(gradients[0], tokens, weight.size(0), padding, false), {}, {}, {}};
    }
    destination.zero_().index_add_(0, tokens.flatten(), gradients[0].reshape({-1, weight.size(1)}));
    if (padding >= 0) destination[padding].zero_();
    return {destination, {}, {}, {}};
  }
};

}  // namespace

at::Tensor unsplit_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          Products products) {
  if (!unobserved(x, weight)) return at::linear(x, weight, bias);  // before any size: a nested tensor has none
  const bool same = x.dim() >= 2 && weight.dim() == 2 && x.size(-1) == weight.size(1) && x.numel() > 0 &&
                    x.scalar_type() == weight.scalar_type();  // all else is torch's to compute, or to refuse
  const bool widens = products == Products::widened && weight.is_cpu();
  if (same && (learns(weight) || widens) && !at::autocast::is_autocast_enabled(weight.device().type())) {
    return Linear::apply(x, weight, bias, widens ? products : Products::as_torch);
  }
  return at::linear(x, weight, bias);
}

at::Tensor unsplit_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t padding_index,
                             const autograd::TiedGradientPtr& tied) {
  if (learns(weight) && unobserved(tokens, weight)) return Embedding::apply(weight, tokens, padding_index, tied);
  return at::embedding(weight, tokens, padding_index);
}

}  // namespace tesserae::tensor
