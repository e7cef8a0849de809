#include "tesserae/experts/routing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"

namespace tesserae::experts {
namespace {

// Scores that all underflow would divide by zero.
constexpr double least_sum = 1e-20;

at::Tensor as_shares(const at::Tensor& scores) {
  return scores.div(scores.sum(-1, /*keepdim=*/true).clamp_min(least_sum));
}

void check(const RoutingOptions& options) {
  const auto& [width, experts, chosen, scores, normalised, scale, balance_loss, z_loss, bias_rate] = options;
  if (width < 1 || experts < 1) {
    throw InvalidArgument("Router", cat(experts, " experts for tokens of width ", width, ": both must be at least 1"));
  }
  if (chosen < 1 || chosen > experts) {
    throw InvalidArgument("Router",
                          cat(chosen, " experts a token of ", experts, ": it must lie in [1, ", experts, "]"));
  }
  if (!(balance_loss >= 0 && z_loss >= 0 && bias_rate >= 0)) {
    throw InvalidArgument("Router", cat("balance_loss ", balance_loss, ", z_loss ", z_loss, ", bias_rate ", bias_rate,
                                        ": none may be negative"));
  }
}

}  // namespace

RouterImpl::RouterImpl(const RoutingOptions& options, const tensor::LayerOptions& layer)
    : options_(options), layer_(layer) {
  check(options_);
  weight = register_parameter("weight", at::empty({options_.experts, options_.width}, layer_.tensors));
  if (options_.bias_rate == 0) return;
  // Where the model computes, also if its parameters are nowhere yet (meta): nobody else would give a buffer values.
  const auto device = at::TensorOptions().device(layer_.parallel->mesh()->job()->device());
  bias = register_buffer("bias", at::zeros({options_.experts}, device.dtype(at::kFloat)));
  chosen_since = at::zeros({options_.experts}, device.dtype(at::kLong));
}

at::Tensor RouterImpl::forward(const at::Tensor& x) const {
  const auto wide = [](const at::Tensor& t) { return t.scalar_type() == at::kDouble ? t : t.to(at::kFloat); };
  // Where a rank sees a part of the tokens, the gradient is summed over the ranks.
  const bool part = layer_.sequence_dim != tensor::no_sequence;
  return at::linear(wide(x), wide(part ? tensor::copy_to_parallel(weight, layer_.parallel) : weight));
}

Routing RouterImpl::route(const at::Tensor& logits) {
  const at::Tensor scores = options_.scores == Scores::softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const at::Tensor ranked = bias.defined() ? scores.detach().add(bias) : scores.detach();
  Routing routing;
  // A stable sort, since top-k may take either of two equal scores.
  const auto order = std::get<1>(at::sort(ranked, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  routing.choice = order.narrow(-1, 0, options_.chosen).contiguous();
  routing.weights = scores.gather(-1, routing.choice);
  if (options_.normalised) routing.weights = as_shares(routing.weights);
  if (options_.scale != 1) routing.weights = routing.weights.mul(options_.scale);
  const at::Tensor choices = routing.choice.flatten();  // counted without a look at them, as bincount would take
  routing.counts = at::zeros({options_.experts}, choices.options()).scatter_add_(0, choices, at::ones_like(choices));
  routing.loss = loss(logits, scores, routing.counts);
  if (chosen_since.defined() && is_training() && !autograd::in_backward()) chosen_since.add_(routing.counts);
  return routing;
}

void RouterImpl::update_bias(const at::Tensor& chosen) {
  if (!bias.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor counts = chosen.to(bias.device(), at::kDouble);
  bias.add_(counts.mean().sub(counts).sign(), options_.bias_rate);
  chosen_since.zero_();
}

// Each rank's is N times its part of what the whole batch has, so that the mean over the N ranks is the loss of one
// process, however many tokens each of them has.
at::Tensor RouterImpl::loss(const at::Tensor& logits, const at::Tensor& scores, const at::Tensor& counts) const {
  if (!is_training() || (options_.balance_loss == 0 && options_.z_loss == 0)) return at::zeros({}, scores.options());
  comm::MeshFabric& mesh = *layer_.parallel->mesh();
  const at::Tensor all = at::cat({counts, at::full({1}, logits.size(0), counts.options())});
  mesh.group(mesh::axes::loss, comm::Traffic::control).all_reduce(all, {"load of experts"});
  const at::Tensor tokens = all.narrow(0, options_.experts, 1).squeeze(0).clamp_min(1).to(scores.scalar_type());
  const at::Tensor times = tokens.reciprocal().mul(mesh.degree(mesh::axes::loss));

  at::Tensor sum = at::zeros({}, scores.options());
  if (options_.balance_loss > 0) {
    const auto experts = static_cast<double>(options_.experts), chosen = static_cast<double>(options_.chosen);
    const at::Tensor shares = all.narrow(0, 0, options_.experts).to(scores.scalar_type()).div(tokens.mul(chosen));
    const at::Tensor means = options_.scores == Scores::softmax ? scores : as_shares(scores);
    sum = sum.add(shares.mul(means.sum(0)).sum(), options_.balance_loss * experts);
  }
  if (options_.z_loss > 0) sum = sum.add(logits.logsumexp(-1).square().sum(), options_.z_loss);
  return sum.mul(times);
}

}  // namespace tesserae::experts
