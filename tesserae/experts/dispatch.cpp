// How rows travel. A token of this rank is a row for each of its k choices:
//
//   x [tokens]  --choices-->  rows by expert  --all-to-all-->  rows by rank, then expert  --by_expert-->  rows by
//   expert
//
// and back by the inverse of each step. Who has how many rows for whom is exchanged first, when the plan is made.
// Dispatch and combine are each other's transpose but for the weights, and share their two halves: out() and back().

#include "tesserae/experts/dispatch.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "tesserae/autograd/backward.h"
#include "tesserae/autograd/node.h"
#include "tesserae/base/error.h"
#include "tesserae/base/work.h"

namespace tesserae::experts {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Plan = std::shared_ptr<const Dispatch>;

const comm::Label label{"rows of experts"};

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Rows on the host, as a list.
std::vector<int64_t> on_host(const at::Tensor& counts) {
  const at::Tensor host = counts.cpu().contiguous();
  const auto* const begin = host.const_data_ptr<int64_t>();
  return {begin, begin + host.numel()};
}

// --- The plan --------------------------------------------------------------------------------------------------------

// How many of this rank's choices each expert takes: all, or those that fit behind what ranks before this one have.
std::vector<int64_t> taken(const at::Tensor& chosen, std::vector<int64_t> counts, double capacity_factor,
                           comm::MeshFabric& mesh) {
  if (capacity_factor <= 0) return counts;
  comm::Group& group = mesh.group(mesh::axes::loss, comm::Traffic::control);
  const at::Tensor all = at::empty({group.size(), chosen.size(0)}, chosen.options());
  all[group.rank()].copy_(chosen);
  group.all_gather(all, {"load of experts"});
  const auto total = static_cast<double>(all.sum().item<int64_t>());
  const auto capacity = static_cast<int64_t>(std::ceil(capacity_factor * total / static_cast<double>(counts.size())));
  const std::vector<int64_t> before = on_host(all.narrow(0, 0, group.rank()).sum(0));
  group.require_intact();
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = std::clamp<int64_t>(capacity - before[i], 0, counts[i]);
  }
  return counts;
}

// The flattened choices by expert, of each expert's the first `take`.
at::Tensor rows_by_expert(const at::Tensor& choice, const std::vector<int64_t>& all, const std::vector<int64_t>& take) {
  at::Tensor order = std::get<1>(at::sort(choice.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false));
  if (sum_of(take) == order.size(0)) return order;
  std::vector<int64_t> kept;
  int64_t begin = 0;
  for (size_t i = 0; i < all.size(); begin += all[i++]) {
    for (int64_t row = begin; row < begin + take[i]; ++row) kept.push_back(row);
  }
  return order.index_select(0, at::tensor(kept, at::kLong).to(order.device()));
}

// Rows have come by rank, then expert: `from` [ranks][experts of this rank]. As a list by expert, then rank.
at::Tensor rows_of_arrival(const std::vector<int64_t>& from, size_t ranks) {
  const size_t experts = from.size() / ranks;
  std::vector<int64_t> begins(from.size(), 0), order;
  std::exclusive_scan(from.begin(), from.end(), begins.begin(), int64_t{0});
  for (size_t expert = 0; expert < experts; ++expert) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t run = rank * experts + expert;
      for (int64_t row = 0; row < from[run]; ++row) order.push_back(begins[run] + row);
    }
  }
  return at::tensor(order, at::kLong);
}

at::Tensor inverse_of(const at::Tensor& order) {
  at::Tensor inverse = at::empty_like(order);
  return inverse.index_copy_(0, order, at::arange(order.size(0), order.options()));
}

// --- Rows ------------------------------------------------------------------------------------------------------------

at::Tensor exchanged(const at::Tensor& rows, const std::vector<int64_t>& to, const std::vector<int64_t>& from,
                     comm::Group& group) {
  if (group.size() == 1) return rows;
  const int64_t width = rows.size(1);
  const auto elements = [width](std::vector<int64_t> counts) {
    for (int64_t& count : counts) count *= width;
    return counts;
  };
  at::Tensor arrived = at::empty({sum_of(from), width}, rows.options());
  group.all_to_all(arrived, rows.contiguous(), elements(from), elements(to), label);
  return arrived;
}

at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order) {
  return order.defined() ? rows.index_select(0, order) : rows;
}

/// Rows by expert, of this rank's tokens, to those of this rank's experts; and back.
at::Tensor out(const at::Tensor& rows, const Dispatch& plan) {
  return reordered(exchanged(rows, plan.sent, plan.received, *plan.group), plan.by_expert);
}
at::Tensor back(const at::Tensor& rows, const Dispatch& plan) {
  return exchanged(reordered(rows, plan.by_rank), plan.received, plan.sent, *plan.group);
}

/// For each row of this rank's tokens that of its token: [sent, width].
at::Tensor rows_of_tokens(const at::Tensor& x, const Dispatch& plan) {
  return x.index_select(0, plan.token_of);
}

/// For each token the sum of its rows, times `weights` if there are any. One choice after the other: the order of
/// additions is always the same, and no more than one row a token is in memory besides.
at::Tensor sum_of_rows(const at::Tensor& rows, const Dispatch& plan, const at::Tensor& weights) {
  const auto wide = at::toOpMathType(rows.scalar_type());
  at::Tensor sum = at::zeros({plan.tokens, rows.size(1)}, rows.options().dtype(wide));
  for (int64_t k = 0; k < plan.chosen && rows.size(0) > 0; ++k) {
    const at::Tensor row = plan.row_of[k];
    at::Tensor part = rows.index_select(0, plan.dropped > 0 ? row.clamp_min(0) : row).to(wide);
    if (weights.defined()) part.mul_(weights.select(1, k).unsqueeze(1));
    if (plan.dropped > 0) part.masked_fill_(row.lt(0).unsqueeze(1), 0);
    sum.add_(part);
  }
  return sum.to(rows.scalar_type());
}

struct Kept : torch::CustomClassHolder {
  explicit Kept(Plan kept) : plan(std::move(kept)) {}
  Plan plan;
};

void keep_plan(AutogradContext* context, const Plan& plan) {
  autograd::keep(context, c10::make_intrusive<Kept>(plan));
}

Plan plan_of(AutogradContext* context) {
  return autograd::kept<Kept>(context, "rows of experts have")->plan;
}

struct DispatchRows : torch::autograd::Function<DispatchRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Plan& plan) {
    keep_plan(context, plan);
    return out(rows_of_tokens(x, *plan), *plan);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Plan plan = plan_of(context);
    return {sum_of_rows(back(gradients[0], *plan), *plan, {}), {}};
  }
};

struct CombineRows : torch::autograd::Function<CombineRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& weights,
                            const Plan& plan) {
    keep_plan(context, plan);
    const at::Tensor returned = back(rows, *plan);
    context->save_for_backward({returned, weights});
    return sum_of_rows(returned, *plan, weights);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Plan kept = plan_of(context);
    const Dispatch& plan = *kept;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &returned = saved[0], &weights = saved[1];
    const at::Tensor dy = rows_of_tokens(gradients[0], plan);
    const at::Tensor times = weights.flatten().index_select(0, plan.choices).unsqueeze(1);
    const at::Tensor dots = returned.to(weights.scalar_type()).mul(dy).sum(1);
    at::Tensor dw = at::zeros({weights.numel()}, weights.options());
    dw.index_copy_(0, plan.choices, dots);
    return {out(dy.mul(times).to(returned.scalar_type()), plan), dw.view(weights.sizes()), {}};
  }
};

}  // namespace

int64_t Dispatch::moved() const {
  const auto own = static_cast<size_t>(group->rank());
  return sum_of(sent) - sent[own] + sum_of(received) - received[own];
}

int64_t experts_of_rank(int64_t experts, int degree) {
  if (experts % degree == 0) return experts / degree;
  std::string divisors;
  for (int64_t i = 1; i <= experts; ++i) {
    if (experts % i == 0) divisors += cat(divisors.empty() ? "" : ", ", i);
  }
  throw InvalidArgument("expert parallelism",
                        cat(experts, " experts cannot be shared out by an expert-parallel degree of ", degree,
                            "; degrees that would do: ", divisors));
}

std::shared_ptr<const Dispatch> plan_dispatch(const at::Tensor& choice, const at::Tensor& chosen,
                                              double capacity_factor, comm::MeshFabric& mesh) {
  const int64_t own = experts_of_rank(chosen.size(0), mesh.degree(mesh::Axis::expert));
  const auto plan = std::make_shared<Dispatch>();
  plan->tokens = choice.size(0);
  plan->chosen = choice.size(1);
  plan->group = &mesh.group(mesh::Axis::expert, comm::Traffic::control);
  const auto ranks = static_cast<size_t>(plan->group->size());

  plan->load = on_host(chosen);
  const std::vector<int64_t> take = taken(chosen, plan->load, capacity_factor, mesh);
  plan->choices = rows_by_expert(choice, plan->load, take);
  plan->token_of = plan->choices.floor_divide(plan->chosen);
  plan->dropped = choice.numel() - plan->choices.size(0);
  const at::Tensor row_of = at::full({choice.numel()}, -1, choice.options());
  row_of.index_copy_(0, plan->choices, at::arange(plan->choices.size(0), choice.options()));
  plan->row_of = row_of.view(choice.sizes()).t().contiguous();

  const at::Tensor there = at::tensor(take, at::kLong).to(choice.device());
  at::Tensor here = there;
  if (ranks > 1) {
    here = at::empty({static_cast<int64_t>(ranks) * own}, there.options());
    const std::vector<int64_t> each(ranks, own);
    plan->group->all_to_all(here, there, each, each, label);
  }
  const std::vector<int64_t> from = on_host(here);
  plan->group->require_intact();
  plan->counts = at::zeros({own}, at::kLong);
  auto* const counts = plan->counts.mutable_data_ptr<int64_t>();
  plan->sent.assign(ranks, 0);
  plan->received.assign(ranks, 0);
  for (size_t i = 0; i < from.size(); ++i) {
    plan->sent[i / static_cast<size_t>(own)] += take[i];
    plan->received[i / static_cast<size_t>(own)] += from[i];
    counts[i % static_cast<size_t>(own)] += from[i];
  }
  if (ranks > 1 && own > 1) {
    const at::Tensor order = rows_of_arrival(from, ranks);
    plan->by_expert = order.to(choice.device());
    plan->by_rank = inverse_of(order).to(choice.device());
  }
  if (!autograd::in_backward()) count_work(Work::expert_tokens, sum_of(plan->received));
  return plan;
}

at::Tensor dispatch(const at::Tensor& x, const Plan& plan) {
  if (x.dim() != 2 || x.size(0) != plan->tokens) {
    throw InvalidArgument("dispatch", cat("x of shape ", x.sizes(), " for ", plan->tokens, " tokens"));
  }
  return DispatchRows::apply(x, plan);
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Plan& plan) {
  const int64_t expected = sum_of(plan->received);
  if (rows.dim() != 2 || rows.size(0) != expected || weights.sizes() != at::IntArrayRef({plan->tokens, plan->chosen})) {
    throw InvalidArgument(
        "combine", cat("rows of shape ", rows.sizes(), " and weights of shape ", weights.sizes(), " for ", expected,
                       " rows of ", plan->tokens, " tokens with ", plan->chosen, " experts each"));
  }
  return CombineRows::apply(rows, weights, plan);
}

}  // namespace tesserae::experts
