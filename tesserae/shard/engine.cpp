#include "tesserae/shard/engine.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/base/log.h"

namespace tesserae::shard {

// 1. Forward.

void Engine::before_forward(int unit) {
  const bool recomputing = autograd::in_backward();
  if (!recomputing) {
    if (unit == 0) {
      begin_step();
    } else if (shows_parameters_ && !forward_open_) {
      publish_unit(unit);  // called by itself, not by the root
    }
    if (at::GradMode::is_enabled()) ++units_[static_cast<size_t>(unit)].forwards;
  }
  gather(unit, recomputing);
}

void Engine::begin_step() {
  require_whole();
  if (backward_open_) abandon_step();
  if (forward_open_) release_all();  // a forward threw before its end
  if (!prepared_) prepare();
  check_parameters();
  if (shows_parameters_ && !accumulating()) {
    if (context().options.elastic) drop_gradients();
    for (int unit = 0; unit < unit_count(); ++unit) publish_unit(unit);
  }
  forward_open_ = true;
  schedule_.restart();
}

void Engine::abandon_step() {
  log(LogLevel::warning, "a backward did not finish: all gradients are dropped, the next step starts clean");
  drain();
  reductions_.clear();
  for (auto& flat : flats_) {
    if (flat.gradient) flat.gradient->zero();
  }
  release_all();
  context().pool->give_back();
  close_backward();
}

bool Engine::accumulating() const {
  for (const auto& flat : flats_) {
    if (flat.gradient && flat.gradient->pending()) return true;
  }
  return false;
}

void Engine::check_parameters() {
  for (const auto& flat : flats_) {
    if (flat.local) {
      flat.local->take_values();
      flat.local->show_requires_grad(flat.tensors);
    }
    if (flat.gradient) continue;
    for (size_t slot = 0; slot < flat.tensors.size(); ++slot) {
      if (!flat.tensors[slot].requires_grad()) continue;
      throw InvalidArgument("Engine", cat("parameter ", flat.flat->slots()[slot].names.front(),
                                          " was frozen when the model was sharded and has requires_grad now: it has no "
                                          "master and no gradient buffer. Unfreeze it before the model is sharded"));
    }
  }
}

void Engine::gather(int unit, bool backward) {
  if (!schedule_.use({unit, backward})) ++context().statistics->departures;
  for (const int index : units_[unit].flats) {
    FlatParameter& parameter = *flats_[index].parameter;
    if (parameter.readable()) {
      parameter.finish_gather();
      continue;
    }
    if (parameter.holds_buffer()) ++context().statistics->prefetch_hits;
    parameter.start_gather();
  }
  look_ahead(backward);
  for (const int index : units_[unit].flats) flats_[index].parameter->finish_gather();
}

void Engine::look_ahead(bool backward) {
  const int limit = context().options.limit_all_gathers;
  if (limit < 2) return;
  int gathered = 0;
  for (int unit = 1; unit < static_cast<int>(units_.size()); ++unit) gathered += holds_buffers(unit);
  schedule_.upcoming(limit, upcoming_);
  for (const auto& use : upcoming_) {
    if (use.backward && !backward && !at::GradMode::is_enabled()) return;  // evaluation: there will be no backward
    if (holds_buffers(use.unit)) continue;
    if (gathered >= limit) return;
    for (const int index : units_[use.unit].flats) flats_[index].parameter->start_gather();
    gathered += holds_buffers(use.unit);
  }
}

bool Engine::holds_buffers(int unit) const {
  for (const int index : units_[unit].flats) {
    if (flats_[index].parameter->holds_buffer()) return true;
  }
  return false;
}

// 2. The end of a forward.

void Engine::after_forward(int unit) {
  if (autograd::in_backward()) return;
  const bool training = at::GradMode::is_enabled();
  if (unit == 0) {
    forward_open_ = false;
    if (!training) {
      release_all();
      context().pool->give_back();
      finish_reading();
      return;
    }
  }
  // The last unit of a forward is the first of the backward: freeing it would only mean gathering it again.
  const bool needed = training && schedule_.needs_soon(unit, context().options.limit_all_gathers);
  if (context(unit).options.strategy.free_after_forward && !needed) release(unit);
  if (!training && !forward_open_) finish_reading();  // called by itself, not by the root
}

void Engine::release(int unit, bool frozen_only) {
  const bool keep = gathers_ahead();
  for (const int index : units_[unit].flats) {
    if (frozen_only && flats_[index].gradient) continue;
    flats_[index].parameter->release(keep);
  }
}

// Whether the rest of the step takes another buffer for parameters.
bool Engine::gathers_ahead() const {
  const auto lacks = [this](int unit) {
    return std::ranges::any_of(units_[static_cast<size_t>(unit)].flats, [this](int index) {
      const FlatParameter& parameter = *flats_[static_cast<size_t>(index)].parameter;
      return parameter.buffer_bytes() > 0 && !parameter.holds_buffer();
    });
  };
  return !context().pool->elastic() || schedule_.any_ahead(lacks);
}

void Engine::release_all() {
  for (int unit = 0; unit < unit_count(); ++unit) release(unit);
}

void Engine::release_after_backward() {
  for (int unit = 0; unit < unit_count(); ++unit) {
    if (frees_after_backward(unit)) release(unit);
  }
}

// 3. The begin of a unit's backward.

at::Tensor Engine::on_input(int unit, const at::Tensor& input) {
  at::Tensor watched = input;
  const auto& precision = context(unit).options.precision;
  if (precision.cast_inputs && precision.parameters && input.defined() && input.is_floating_point()) {
    watched = input.to(*precision.parameters);
  }
  if (units_[unit].has_frozen && watched.defined() && watched.requires_grad() && !watched.is_leaf()) {
    watched.register_hook([alive = std::weak_ptr<Engine*>(alive_), unit](const at::TensorBase&) {
      const auto engine = alive.lock();
      if (engine && (*engine)->frees_after_backward(unit)) (*engine)->release(unit, /*frozen_only=*/true);
    });
  }
  return watched;
}

void Engine::on_output(int unit, const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad() || !at::GradMode::is_enabled()) return;
  output.register_hook([alive = std::weak_ptr<Engine*>(alive_), unit](const at::TensorBase&) {
    if (const auto engine = alive.lock()) (*engine)->before_backward(unit);
  });
}

void Engine::before_backward(int unit) {
  open_backward();
  gather(unit, /*backward=*/true);
  if (auto* handle = units_[static_cast<size_t>(unit)].handle) handle->begin_backward();
}

void Engine::open_backward() {
  if (backward_open_) return;
  backward_open_ = true;
  for (auto& flat : flats_) {
    if (flat.gradient) flat.gradient->begin_backward();
  }
  if (boundary_) take_gradients();
  autograd::at_end_of_backward([alive = std::weak_ptr<Engine*>(alive_)] {
    if (const auto engine = alive.lock()) (*engine)->end_backward();
  });
}

void Engine::close_backward() {
  backward_open_ = false;
  for (auto& unit : units_) {
    unit.forwards = 0;
    if (unit.handle != nullptr) unit.handle->end_backward();
  }
}

// [Note: shared copy] From here on this rank may write its parts, and so may the others.
void Engine::finish_reading() {
  std::vector<const comm::Group*> done;
  for (const auto& flat : flats_) {
    if (!flat.parameter->shared()) continue;
    Context& context = this->context(flat.unit);
    comm::Group& group = context.parameter_group;
    if (std::ranges::find(done, &group) != done.end()) continue;
    done.push_back(&group);
    const comm::Label label{"all units read", context.statistics->steps};
    wait_and_count(context.gather_lane.submit([&group, label] { group.barrier(label); }),
                   context.statistics->exposed_gather);
  }
}

bool Engine::frees_after_backward(int unit) const {
  const auto& strategy = context(unit).options.strategy;
  return strategy.free_after_backward && (boundary_ || strategy.free_after_forward);
}

// 4. Gradients.

void Engine::on_gradient(int index, int slot, const at::Tensor& gradient) {
  open_backward();
  FlatState& flat = flats_[index];
  if (flat.gradient->needs_buffer()) limit_reductions(context().options.limit_reductions - 1);
  flat.gradient->add(slot, gradient);
  if (!flat.gradient->complete()) return;
  if (reduces_now()) {
    reduce(flat);
  } else {
    flat.gradient->begin_backward();
  }
  if (frees_after_backward(flat.unit)) flat.parameter->release(gathers_ahead());
}

at::Tensor Engine::place_of_gradient(int index, int slot) {
  FlatState& flat = flats_[index];
  // A buffer would be held from the unit's last use to its first, with others in between.
  if (units_[static_cast<size_t>(flat.unit)].forwards > 1) return {};
  if (flat.flat->dtypes().reduce != flat.flat->dtypes().compute) return {};
  // A tied parameter has several gradients in a backward: autograd adds them up elsewhere.
  if (flat.flat->slots()[static_cast<size_t>(slot)].names.size() > 1) return {};
  open_backward();
  // Waits rather than let the caller do without: what is computed elsewhere may be rounded in another way, and results
  // must not depend on timing.
  if (flat.gradient->needs_buffer()) limit_reductions(context().options.limit_reductions - 1);
  return flat.gradient->place(slot);
}

bool Engine::reduces_now() const {
  return boundary_ || context().options.accumulation == Accumulation::two_hop;
}

void Engine::reduce(FlatState& flat) {
  // A buffer that completes again while its last reduction is in flight waits for that one first.
  if (flat.gradient->reducing()) {
    std::erase(reductions_, flat.gradient.get());
  }
  flat.gradient->reduce(boundary_);
  reductions_.push_back(flat.gradient.get());
}

void Engine::limit_reductions(int most) {
  // What has ended gives its buffer back early. On a device a ticket does not tell: finishing it would make the compute
  // stream wait.
  const bool tells = context().device.is_cpu();
  const auto ended = [&] { return tells && reductions_.front()->reduced(); };
  while (!reductions_.empty() && (static_cast<int>(reductions_.size()) > most || ended())) {
    reductions_.front()->finish();
    reductions_.pop_front();
  }
}

// 5. The end of a backward.

void Engine::end_backward() {
  if (reduces_now()) {
    for (auto& flat : flats_) {
      if (!flat.gradient) continue;
      const bool left = boundary_ ? flat.gradient->pending() : !flat.gradient->needs_buffer();
      if (left) {
        limit_reductions(context().options.limit_reductions - 1);
        reduce(flat);
      }
    }
  }
  limit_reductions(0);
  release_after_backward();
  context().pool->give_back();
  if (boundary_) {
    finish_reading();
    ++context().statistics->steps;
    show_gradients();
  }
  schedule_.finish();
  close_backward();
}

}  // namespace tesserae::shard
