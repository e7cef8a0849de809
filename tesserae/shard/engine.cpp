// A step.
//
//  1. before_forward(unit): gather (usually started earlier by the schedule), then start the next ones, bounded by
//     limit_all_gathers. The root's call begins the step.
//  2. after_forward(unit): free, if the lifetime says so and the schedule does not need the unit next.
//  3. before_backward(unit), from a hook on the unit's outputs: gather again and look ahead in backward order. The
//     first one asks autograd to call step 6 when the backward ends.
//  4. on_gradient(): a parameter's gradient is final for this backward (hook on its AccumulateGrad node; the tensor's
//     own post-accumulate slot belongs to the user). It moves into the unit's buffer, unless it was computed there
//     (gradient_destination); the last one of a flat buffer frees its parameters, if the lifetime says so, the last
//     one of the unit starts its reduction (at a boundary, or with two_hop).
//  5. after_input_gradient(unit), from a hook on the unit's inputs: its backward is over, and parameters that have had
//     no gradient get none. Frozen ones are freed; once this was the unit's last call, all are, and what gradients
//     there are start their reduction: where other ranks, which had them all, have started theirs.
//  6. end_backward(): reduce what is left (units whose inputs have no gradient), in unit order, the same on all ranks;
//     wait for all reductions; free what the lifetimes say.
//
// [Note: completion] A unit may complete zero, one or several times in a backward; each completion reduces and adds.
// A forward that happens during a backward (recomputation) only gathers: its after_forward may never come.

#include "tesserae/shard/engine.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tesserae/autograd/backward.h"
#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::shard {
namespace {

using Units = std::vector<std::unique_ptr<ShardedUnit>>;

template <class Event>
void tell(const Units& units, const Event& event) {
  for (const auto& unit : units) {
    unit->tell([&](StepObserver& observer) { event(observer, *unit); });
  }
}

}  // namespace

// 1. Forward.

void Engine::before_forward(ShardedUnit& unit) {
  const autograd::OrdinaryTensors ordinary;
  const bool recomputing = autograd::in_backward();
  if (!recomputing && &unit == &root()) {
    begin_step();
  } else if (!recomputing && phase_ != Phase::forward) {
    begin_alone(unit);
  }
  unit.tell([&](StepObserver& observer) { observer.before_forward(unit); });
  if (recomputing) {
    gather(unit, /*backward=*/true);
    return;
  }
  unit.enter_forward();
  try {
    gather(unit, /*backward=*/false);
  } catch (...) {
    unit.leave_forward(/*cancelled=*/true);
    throw;
  }
}

void Engine::cancel_forward(ShardedUnit& unit) {
  if (!autograd::in_backward()) unit.leave_forward(/*cancelled=*/true);
}

void Engine::begin_step() {
  require_not_torn();
  if (phase_ == Phase::backward) abandon_step();
  const bool threw = phase_ == Phase::forward;  // the forward of before did, before its end
  for (const auto& unit : units_) threw ? unit->cut_short() : unit->reset();
  if (threw) free_all();
  if (!prepared()) prepare();
  // Evaluating within an accumulation publishes, and others may still be in the backward before it.
  const auto accumulating = [](const auto& unit) { return unit->accumulating(); };
  if (!at::GradMode::is_enabled() && std::ranges::any_of(units_, accumulating)) finish_reading();
  for (const auto& unit : units_) {
    const bool accumulates = unit->accumulating();
    unit->tell([&](StepObserver& observer) { observer.begin_step(*unit, accumulates); });
  }
  thaw();
  enter(Phase::idle);  // from a forward that was cut short, if there was one
  enter(Phase::forward);
  schedule_.restart();
}

/// What was frozen at set-up and is to be trained now. Shards keep their numbers.
void Engine::thaw() {
  std::vector<FlatBuffer*> thawing;
  for (FlatBuffer* buffer : buffers_) {
    if (buffer->is_thawing()) thawing.push_back(buffer);
  }
  if (thawing.empty()) return;
  for (const FlatBuffer* buffer : thawing) buffer->require_can_thaw();
  std::vector<PoolPart> planned = plan_of_pool();
  for (FlatBuffer* buffer : thawing) {
    buffer->unit().tell([&](StepObserver& observer) { observer.before_recut(*buffer); });
    buffer->thaw();
    buffer->shard()->index = static_cast<int>(shards_.size());
    shards_.add(buffer->shard());
    buffer->unit().tell([&](StepObserver& observer) { observer.after_recut(*buffer); });
  }
  std::vector<PoolPart> more;
  for (const PoolPart& part : plan_of_pool()) {
    const auto same = std::ranges::find(planned, part);
    same == planned.end() ? more.push_back(part) : void(planned.erase(same));
  }
  if (prepared()) reserve(more);
}

/// A part of the model is called by itself: no forward of the root has begun a step.
void Engine::begin_alone(ShardedUnit& unit) {
  require_not_torn();
  if (phase_ == Phase::backward) abandon_step();
  if (unit.accumulating()) finish_reading();
  unit.tell([&](StepObserver& observer) { observer.begin_alone(unit); });
  if (std::ranges::any_of(unit.buffers(), [](const auto& buffer) { return buffer->is_thawing(); })) thaw();
}

void Engine::abandon_step() {
  log(LogLevel::warning, "a backward did not finish: all gradients are dropped, the next step starts clean");
  drain();
  reductions_.clear();
  for (const FlatBuffer* buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->zero();
  }
  for (const auto& unit : units_) {
    unit->set_accumulating(false);
    unit->cut_short();
  }
  free_all();
  workspace_->pool.give_back();
  close_backward();
}

void Engine::gather(ShardedUnit& unit, bool backward) {
  // A gather may wait for nobody (P is 1, or the ranks share their copy), and a backward may reduce nothing: the rest
  // of a broken step would be computed before anybody heard of the loss.
  if (backward || at::GradMode::is_enabled()) unit.sharding().fabric->require_alive(unit.label());
  if (!schedule_.use({unit.index(), backward})) ++workspace_->statistics.departures;
  unit.tell([&](StepObserver& observer) { observer.before_gather(unit); });
  for (const auto& buffer : unit.buffers()) {
    workspace_->statistics.prefetch_hits += buffer->parameter().arriving();
  }
  unit.start_gather();
  look_ahead(backward);
  unit.finish_gather();
  unit.tell([&](StepObserver& observer) { observer.after_gather(unit); });
}

void Engine::look_ahead(bool backward) {
  const int limit = root().sharding().options.limit_all_gathers;
  if (limit < 2) return;
  // Of what stays gathered anyway, the limit is on what is on its way; of the rest, on what takes memory.
  int gathered = 0;
  for (const auto& unit : units_) {
    const bool stays = !(backward ? unit->frees_after_backward() : unit->frees_after_forward());
    gathered += unit->index() > 0 && (stays ? unit->arriving() : unit->holds_buffers());
  }
  schedule_.upcoming(limit, upcoming_);
  for (const auto& use : upcoming_) {
    if (use.backward && !backward && !at::GradMode::is_enabled()) return;  // evaluation: there will be no backward
    ShardedUnit& unit = *units_[static_cast<size_t>(use.unit)];
    if (unit.holds_newest()) continue;
    if (!use.backward && unit.follows()) continue;
    if (gathered >= limit) return;
    unit.start_gather();
    gathered += unit.holds_buffers();
  }
}

// 2. The end of a forward.

void Engine::after_forward(ShardedUnit& unit) {
  const autograd::OrdinaryTensors ordinary;
  if (autograd::in_backward()) return;
  unit.leave_forward();
  const bool training = at::GradMode::is_enabled();
  const bool is_root = &unit == &root();
  if (is_root && phase_ == Phase::forward) enter(Phase::idle);
  if (is_root && !training) {
    free_all();
    workspace_->pool.give_back();
    finish_reading();
  } else {
    // The last unit of a forward is the first of the backward: freeing it would only mean gathering it again.
    const bool needed = training && schedule_.needs_soon(unit.index(), root().sharding().options.limit_all_gathers);
    const bool computes = unit.phase() == ShardedUnit::Phase::forward;  // a call around this one
    if (unit.frees_after_forward() && !needed && !computes) {
      if (training) unit.rest();
      free(unit);
    }
    if (!training && phase_ != Phase::forward) finish_reading();  // called by itself, not by the root
  }
  unit.tell([&](StepObserver& observer) { observer.after_forward(unit); });
}

// Whether the rest of the step takes another buffer for parameters.
bool Engine::keeps_freed_memory() const {
  return !workspace_->pool.elastic() ||
         schedule_.any_ahead([this](int unit) { return units_[static_cast<size_t>(unit)]->lacks_buffers(); });
}

void Engine::free_all() {
  for (const auto& unit : units_) free(*unit);
}

// 3. The beginning of a unit's backward.

void Engine::before_backward(ShardedUnit& unit) {
  open_backward();
  unit.enter_backward();
  gather(unit, /*backward=*/true);
  unit.tell([&](StepObserver& observer) { observer.before_backward(unit); });
}

void Engine::open_backward() {
  if (phase_ == Phase::backward) return;
  require_not_torn();
  around_backward_ = phase_;
  makes_graph_ = at::GradMode::is_enabled();
  enter(Phase::backward);
  for (const FlatBuffer* buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->expect_all();
  }
  tell(units_, [this](StepObserver& observer, ShardedUnit& unit) { observer.begin_backward(unit, is_boundary(unit)); });
  autograd::at_end_of_backward([alive = std::weak_ptr<Engine*>(alive_)] {
    if (const auto engine = alive.lock()) (*engine)->end_backward();
  });
}

void Engine::close_backward() {
  enter(around_backward_);
  for (const auto& unit : units_) unit->leave_backward(makes_graph_);
  tell(units_, [](StepObserver& observer, ShardedUnit& unit) { observer.end_backward(unit); });
}

// [Note: shared copy] From here on this rank may write its parts, and so may the others. And the host may read and
// write its memory, which copies from and to an accelerator have reached meanwhile: one wait for all of them.
void Engine::finish_reading() {
  wait_for_copies();
  std::vector<const comm::Group*> done;
  for (const FlatBuffer* buffer : buffers_) {
    if (!buffer->parameter().shared()) continue;
    const Sharding& sharding = buffer->unit().sharding();
    comm::Group& group = sharding.parameter_group;
    if (std::ranges::find(done, &group) != done.end()) continue;
    done.push_back(&group);
    const comm::Label label{"all units read", workspace_->statistics.steps};
    workspace_->exposed_gather.wait(sharding.gather_lane.submit([&group, label] { group.barrier(label); }));
  }
}

void Engine::wait_for_copies() {
  for (const auto& unit : units_) {
    const Sharding& sharding = unit->sharding();
    if (sharding.device.is_cpu() || !sharding.state_device.is_cpu()) continue;
    if (&unit != &units_.front() && &sharding == &root().sharding()) continue;  // the same lanes
    for (comm::Lane* const lane : {&sharding.gather_lane, &sharding.reduce_lane}) {
      lane->drain();
      if (lane->kind() == comm::Lane::Kind::stream) continue;
      const c10::impl::VirtualGuardImpl guard(sharding.device.type());  // they ran on the stream that computes
      guard.synchronizeStream(guard.getStream(sharding.device));
    }
  }
}

// A unit whose forward is around this backward goes on computing. With create_graph, the backward of the graph that is
// made here reads parameters again, and nothing will announce it: they stay until that is over.
bool Engine::frees_after_backward(const ShardedUnit& unit) const {
  return unit.frees_after_backward() && (boundary_ || unit.frees_after_forward()) &&
         unit.phase() != ShardedUnit::Phase::forward && !makes_graph_;
}

// 4. Gradients.

void Engine::on_gradient(FlatBuffer& buffer, int slot, const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) {
    throw InvalidArgument("Engine", cat("the gradient of parameter ", buffer.flat().slots()[slot].names.front(),
                                        " is sparse, and gradients are reduced whole: make the layer without "
                                        "sparse=True"));
  }
  open_backward();
  FlatGradient& gradients = *buffer.gradient();
  if (gradients.needs_buffer()) wait_for_reductions(root().sharding().options.limit_reductions - 1);
  gradients.add(slot, gradient, /*waits=*/!reduces_now(buffer.unit()));
  if (!gradients.complete()) return;
  if (!reduces_now(buffer.unit())) {
    gradients.expect_all();
  } else if (buffer.unit().has_all_gradients() && !buffer.unit().reduces_unused()) {
    reduce(buffer.unit(), is_boundary(buffer.unit()));
  }
  if (frees_after_backward(buffer.unit())) buffer.unit().free(buffer, keeps_freed_memory());
}

at::Tensor Engine::gradient_destination(FlatBuffer& buffer, int slot) {
  // A buffer would be held from the unit's last use to its first, with others in between.
  if (buffer.unit().forwards() > 1) return {};
  const Flat& flat = buffer.flat();
  if (flat.dtypes().reduce != flat.dtypes().compute) return {};
  // A tied parameter has several gradients in a backward: autograd adds them up elsewhere.
  if (flat.slots()[static_cast<size_t>(slot)].names.size() > 1) return {};
  open_backward();
  // Waits rather than let the caller do without: what is computed elsewhere may be rounded in another way, and results
  // must not depend on timing.
  if (buffer.gradient()->needs_buffer()) wait_for_reductions(root().sharding().options.limit_reductions - 1);
  return buffer.gradient()->destination(slot);
}

bool Engine::reduces_now(const ShardedUnit& unit) const {
  return is_boundary(unit) || unit.keeps_pieces();
}

void Engine::reduce(ShardedUnit& unit, bool boundary) {
  // A unit that completes again while its last reduction is in flight waits for that one first.
  if (unit.reducing()) {
    unit.finish_reducing();
    std::erase(reductions_, &unit);
  }
  unit.reduce_gradients(boundary);
  reductions_.push_back(&unit);
}

void Engine::wait_for_reductions(int most) {
  // What has ended gives its buffer back early. On a device a ticket does not tell: finishing it would make the compute
  // stream wait.
  const bool tells = root().sharding().device.is_cpu();
  const auto ended = [&] { return tells && reductions_.front()->reduced(); };
  while (!reductions_.empty() && (static_cast<int>(reductions_.size()) > most || ended())) {
    reductions_.front()->finish_reducing();
    reductions_.pop_front();
  }
}

// 5. The end of a unit's backward.

void Engine::after_input_gradient(ShardedUnit& unit) {
  const bool last = unit.end_call();
  const bool boundary = is_boundary(unit);
  if (last && reduces_now(unit) && !unit.reduces_unused() && unit.has_gradients(boundary)) reduce(unit, boundary);
  if (!frees_after_backward(unit)) return;
  if (last) {
    free(unit);
  } else if (!unit.computes_backward()) {
    unit.free_frozen(keeps_freed_memory());
  }
}

// 6. The end of a backward.

void Engine::end_backward() {
  for (const auto& unit : units_) {
    if (!reduces_now(*unit) || !unit->has_gradients(is_boundary(*unit))) continue;
    wait_for_reductions(root().sharding().options.limit_reductions - 1);
    reduce(*unit, is_boundary(*unit));
  }
  wait_for_reductions(0);
  for (const auto& unit : units_) {
    if (frees_after_backward(*unit)) free(*unit);
  }
  workspace_->pool.give_back();
  bool reduced = false;
  for (const auto& unit : units_) {
    unit->set_accumulating(!is_boundary(*unit));
    reduced = reduced || is_boundary(*unit);
  }
  if (reduced) {
    finish_reading();
    ++workspace_->statistics.steps;
  }
  const auto tell_reduced = [this](const auto& event) {
    for (const auto& unit : units_) {
      if (is_boundary(*unit)) unit->tell([&](StepObserver& observer) { event(observer, *unit); });
    }
  };
  tell_reduced([](StepObserver& observer, ShardedUnit& unit) { observer.show_gradients(unit); });
  schedule_.finish();
  close_backward();
  tell_reduced([](StepObserver& observer, ShardedUnit& unit) { observer.after_backward(unit); });
}

}  // namespace tesserae::shard
