#include "tesserae/experts/moe.h"

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/experts/dispatch.h"

namespace tesserae::experts {
namespace {

constexpr double largest_capacity_factor = 1e6;

Load load_of(const Dispatch& plan, const at::Tensor& rows) {
  return {plan.load, plan.dropped, static_cast<uint64_t>(plan.moved() * rows.size(1) * rows.element_size())};
}

}  // namespace

MoeImpl::MoeImpl(const MoeOptions& options, const tensor::LayerOptions& layer) : options_(options), layer_(layer) {
  if (!(options_.capacity_factor >= 0 && options_.capacity_factor <= largest_capacity_factor)) {
    throw InvalidArgument("Moe", cat("capacity_factor is ", options_.capacity_factor, "; it must lie in [0, ",
                                     largest_capacity_factor, "] (0: nothing is dropped)"));
  }
  const RoutingOptions& routing = options_.routing;
  router_ = register_module("router", Router(routing, layer_));
  const ExpertsOptions experts{routing.experts, routing.width, options_.hidden};
  experts_ = register_module("experts", shard::Unit<Experts>(experts, layer_));
  if (options_.shared_hidden == 0) return;
  const tensor::MlpOptions swiglu{
      .width = routing.width, .hidden = options_.shared_hidden, .activation = tensor::Activation::silu, .gated = true};
  shared_ = register_module("shared", tensor::Mlp(swiglu, layer_));
}

std::tuple<at::Tensor, at::Tensor> MoeImpl::forward(const at::Tensor& x) {
  const tensor::ParallelPtr& parallel = layer_.parallel;
  const int64_t sequence = layer_.sequence_dim;
  const bool split = sequence != tensor::no_sequence;
  // Of logits and losses all tensor-parallel ranks have the same, and so the same gradients. Experts give parts of y,
  // and so parts of the gradients of x and of the weights, which are summed.
  at::Tensor logits = router_->forward(x);
  if (split) logits = tensor::gather_from(logits, sequence, parallel);
  const Routing routing = router_->route(logits.flatten(0, -2));
  const at::Tensor all = split ? tensor::gather_sequence(x, sequence, parallel) : tensor::copy_to_parallel(x, parallel);
  const at::Tensor weights = tensor::copy_to_parallel(routing.weights, parallel);

  const auto plan = plan_dispatch(routing.choice, routing.counts, options_.capacity_factor, *parallel->mesh());
  const at::Tensor rows = dispatch(all.reshape({-1, all.size(-1)}), plan);
  if (!autograd::in_backward()) load_ = load_of(*plan, rows);
  const at::Tensor sums = combine(experts_->forward(rows, plan->counts), weights, plan).view(all.sizes());
  at::Tensor y =
      split ? tensor::reduce_scatter_sequence(sums, sequence, parallel) : tensor::reduce_from(sums, parallel);
  if (!shared_.is_empty()) y = y.add(shared_->forward(x));
  return {y, routing.loss};
}

}  // namespace tesserae::experts
