// Turning the dial.
//
//  1. All ranks ask for the same degrees, hold the same kinds of state, and the degrees are possible.
//  2. Nothing is in flight: a step that was cut short is forgotten, accumulated gradients go to their owners.
//  3. The groups of the new degrees are made, or found: the fabric keeps them.
//  4. Each host or device has the memory for the largest moment of step 6.
//  5. Gathered copies are given up; what still shows a buffer of the old pool goes with its flat buffer in step 6.
//  6. Flat buffer by flat buffer, new parts are filled from the old ones, which are freed; then parameters, gradients,
//     the user's tensors and companions take the new ones.
//  7. The pool is reserved anew, masters become what the next forward sees, and what was freed goes back to the system.
//
// Up to 4 a failure is one of all ranks and moves nothing. After 4 it leaves the model between two layouts, which torn_
// remembers. Steps 1 and 4 are in reshard_checks.cpp.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/parts.h"

namespace tesserae::shard {
namespace {

constexpr const char* name = "reshard";

std::string failure_of(const std::function<void()>& act) {
  try {
    act();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

Resharding Engine::reshard(const mesh::Degrees& degrees) {
  const auto begin = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  Resharding result{context().layout.degrees(), degrees};
  // 1.
  require_resharding(degrees);
  if (std::ranges::all_of(units_, [&](const UnitState& unit) { return unit.context->layout.degrees() == degrees; })) {
    return result;
  }
  // 2.
  settle();
  const std::vector<bool> gradients = gradients_of_all();
  // 3.
  next_contexts_ = contexts_for(degrees);
  // 4.
  require_memory(gradients);
  // 5.
  torn_ = true;
  context().statistics->pool_misses += context().pool->misses();
  for (auto& unit : units_) unit.context->pool = next_contexts_.front()->pool;
  // 6.
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const int flat : units_[unit].flats) {
      result.bytes +=
          recut(flats_[static_cast<size_t>(flat)], *next_contexts_[unit], gradients[static_cast<size_t>(flat)]);
    }
    units_[unit].context = next_contexts_[unit];
  }
  next_contexts_.clear();
  // 7.
  require_all(failure_of([this] {
                if (prepared_) reserve_pool();
              }),
              "the buffer pool");
  for (auto& flat : flats_) flat.parameter->publish();
  os::give_back_freed_memory();
  torn_ = false;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

std::shared_ptr<void> Engine::attach(Companion& companion) {
  companions_.push_back(&companion);
  return {&companion, [alive = std::weak_ptr<Engine*>(alive_)](void* gone) {
            if (const auto engine = alive.lock()) std::erase((*engine)->companions_, static_cast<Companion*>(gone));
          }};
}

// 2.

void Engine::settle() {
  if (backward_open_) abandon_step();
  take_gradients();
  for (auto& flat : flats_) {
    if (flat.local) flat.local->take_values();
    if (!flat.gradient || !flat.gradient->pending()) continue;
    limit_reductions(context().options.limit_reductions - 1);
    flat.gradient->reduce(/*boundary=*/true);
    reductions_.push_back(flat.gradient.get());
  }
  limit_reductions(0);
  release_all();
  drain();
  show_gradients();
}

// By flat buffer: whether a rank has a gradient. Those that hold no element of it, or unused ones, may have none.
std::vector<bool> Engine::gradients_of_all() {
  std::vector<bool> found;
  for (const auto& flat : flats_) {
    const bool mine = flat.shard >= 0 && shards_[static_cast<size_t>(flat.shard)].grad.defined();
    const auto all = from_all_ranks(*context(flat.unit).fabric, mine ? 1 : 0);
    found.push_back(std::ranges::max(all) > 0);
  }
  return found;
}

// 3.

std::vector<std::shared_ptr<Context>> Engine::contexts_for(const mesh::Degrees& degrees) const {
  std::map<const Context*, std::shared_ptr<Context>> made;
  std::vector<std::shared_ptr<Context>> contexts;
  for (const auto& unit : units_) {
    const Context& last = *unit.context;
    auto& next = made[&last];
    if (!next) {
      Options options = last.options;
      auto& strategy = options.strategy;
      const bool never_freed = !strategy.free_after_forward && !strategy.free_after_backward;
      if (strategy.degrees.parameters == 1 && never_freed) {
        strategy.free_after_forward = strategy.free_after_backward = true;
      }
      strategy.degrees = degrees;
      next = std::make_shared<Context>(last.fabric, options);
      next->reduce_hook = last.reduce_hook;
      next->statistics = last.statistics;
      next->pool = contexts.empty() ? next->pool : contexts.front()->pool;
      // Its connections are not part of moving, either.
      last.fabric->group(last.fabric->world().host_ranks(last.fabric->rank()), comm::Traffic::control);
    }
    contexts.push_back(next);
  }
  return contexts;
}

// 6.

uint64_t Engine::recut(FlatState& state, Context& context, bool has_gradient) {
  Shard* const shard = state.shard < 0 ? nullptr : &shards_[static_cast<size_t>(state.shard)];
  const Flat& from = *state.flat;
  auto flat =
      std::make_unique<Flat>(from.unit(), from.slots(), from.dtypes(), from.trainable(), context.layout, from.rank());
  const at::Tensor shared = prepared_ ? FlatParameter::shared_memory(context, *flat) : at::Tensor();
  std::vector<at::Tensor> before, after;
  std::vector<size_t> kept;  // where in them what a companion keeps ends
  at::Tensor piece;
  const auto prepare = [&] {
    before.push_back(state.parameter->part());
    if (has_gradient) before.push_back(shard->grad.defined() ? shard->grad : state.gradient->memory().zero_());
    for (Companion* companion : companions_) {
      if (shard == nullptr) break;
      std::ranges::move(companion->take(*shard), std::back_inserter(before));
      kept.push_back(before.size());
    }
    after.push_back(new_part(context, *flat, shared));
    while (after.size() < before.size()) {
      after.push_back(new_part(context, *flat, before[after.size()].scalar_type()));
    }
    piece = shard != nullptr ? piece_for(context, *flat, after[0]) : after[0];
  };
  require_all(failure_of(prepare), cat("its part of unit \"", flat->unit(), "\""));
  const uint64_t bytes = move_parts(*context.fabric, from, *flat, before, after);

  const std::vector<at::Tensor> shown = state.local ? state.local->parameters() : std::vector<at::Tensor>();
  ComputeStorage storage(state.parameter->take_storage(), *flat);
  state.local.reset();
  state.parameter.reset();
  before.clear();
  const at::Tensor master = shard != nullptr ? after[0] : at::Tensor();
  state.parameter = std::make_unique<FlatParameter>(context, *flat, std::move(storage), master, piece);
  state.parameter->share(shared);
  if (shard != nullptr) {
    *shard = {shard->index, master, has_gradient ? after[1] : at::Tensor(), flat->slices(flat->chunk_range())};
    state.gradient = std::make_unique<FlatGradient>(context, *flat, *shard);
    state.gradient->adopt(shard->grad);
  }
  state.flat = std::move(flat);
  if (!shown.empty()) {
    state.local = std::make_unique<LocalParameters>(*state.flat, *state.parameter, state.gradient.get(), shown);
    state.local->show_part();
    if (shard != nullptr) state.local->show_gradients(*shard);
  }
  for (size_t i = 0, begin = has_gradient ? 2 : 1; i < kept.size(); begin = kept[i++]) {
    companions_[i]->put(*shard,
                        {after.begin() + static_cast<int64_t>(begin), after.begin() + static_cast<int64_t>(kept[i])});
  }
  return bytes;
}

// What failed on one rank stops all. Each that failed names its own cause.
void Engine::require_all(const std::string& failure, const std::string& what) const {
  const auto failed = from_all_ranks(*context().fabric, failure.empty() ? 0 : 1);
  const auto first = std::ranges::max_element(failed);
  if (*first == 0) return;
  const auto rank = failure.empty() ? first - failed.begin() : context().fabric->rank();
  throw comm::CommError(
      name, cat("rank ", rank, " could not make ", what, failure.empty() ? "; its own error says why" : ": ", failure,
                ". The training state is between two layouts: start the job again from its last checkpoint"));
}

}  // namespace tesserae::shard
