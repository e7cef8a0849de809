// What an engine does between steps: publish new values, visit parameters, count.

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tesserae/base/error.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"

namespace tesserae::shard {

void Engine::publish(int shard) {
  require_whole();
  for (auto& flat : flats_) {
    if (flat.shard == shard) flat.parameter->publish();
  }
}

void Engine::publish_unit(int unit) {
  for (const int index : units_[static_cast<size_t>(unit)].flats)
    flats_[static_cast<size_t>(index)].parameter->publish();
}

void Engine::zero_grad() {
  for (auto& flat : flats_) {
    if (!flat.gradient) continue;
    flat.gradient->zero();
    if (context().options.elastic) flat.gradient->give_back();
  }
  show_gradients();
}

void Engine::discard_accumulated() {
  for (auto& flat : flats_) {
    if (flat.gradient) flat.gradient->discard();
  }
}

void Engine::take_gradients() {
  for (auto& flat : flats_) {
    if (flat.gradient && flat.local) flat.local->take_gradients(shards_[static_cast<size_t>(flat.shard)]);
  }
}

// The memory of gradients that the user has let go.
void Engine::drop_gradients() {
  for (auto& flat : flats_) {
    if (!flat.gradient || !flat.local || flat.local->any_gradient()) continue;
    flat.gradient->zero();
    flat.gradient->give_back();
    flat.local->show_gradients(shards_[static_cast<size_t>(flat.shard)]);
  }
}

void Engine::show_gradients() {
  for (auto& flat : flats_) {
    if (flat.gradient && flat.local) flat.local->show_gradients(shards_[static_cast<size_t>(flat.shard)]);
  }
}

void Engine::visit_parameters(const std::function<void(const std::string&, at::Tensor)>& visit, bool writeback) {
  require_whole();
  const at::NoGradGuard no_grad;
  for (auto& flat : flats_) {
    const at::Tensor whole = flat.parameter->gather(flat.parameter->part());
    ++context().statistics->allocations;
    for (const Slot& slot : flat.flat->slots()) {
      const at::Tensor parameter = whole.narrow(0, slot.begin, slot.elements).view(slot.shape);
      for (const auto& name : slot.names) visit(name, parameter);
    }
    if (!writeback) continue;
    flat.parameter->scatter(whole);
    flat.parameter->publish();
  }
}

int64_t Engine::parameter_count() const {
  int64_t count = 0;
  for (const auto& flat : flats_) {
    for (const Slot& slot : flat.flat->slots()) count += c10::multiply_integers(slot.whole);
  }
  return count;
}

Engine::FlatView Engine::flat_of(int unit, int index) {
  FlatState& state = flats_[static_cast<size_t>(units_[static_cast<size_t>(unit)].flats[static_cast<size_t>(index)])];
  return {*state.flat, *state.parameter, state.gradient.get(), state.local.get(),
          state.shard < 0 ? nullptr : &shards_[static_cast<size_t>(state.shard)]};
}

void Engine::visit_flats(const std::function<void(int unit, const FlatView& view)>& visit) {
  for (int unit = 0; unit < unit_count(); ++unit) {
    for (int index = 0; index < flats_of(unit); ++index) visit(unit, flat_of(unit, index));
  }
}

double Engine::sum_over_ranks(double value) {
  const auto all = from_all_ranks(*context().fabric, value, {"", context().statistics->steps});
  return std::accumulate(all.begin(), all.end(), 0.0);
}

double Engine::max_over_ranks(double value) {
  double most = value;
  for (const double other : from_all_ranks(*context().fabric, value, {"", context().statistics->steps})) {
    if (!(other <= most)) most = other;  // also one that is no number
    if (std::isnan(most)) break;
  }
  return most;
}

int Engine::replicas(int shard) const {
  for (const auto& flat : flats_) {
    if (flat.shard == shard) return flat.flat->layout().replicas();
  }
  throw InvalidArgument("Engine::replicas", cat("shard ", shard, " of ", shards_.size()));
}

std::string Engine::describe() const {
  std::vector<UnitSpec> specs;
  std::string text;
  for (const auto& unit : units_) {
    const Options& options = unit.context->options;
    text += cat("degrees of unit \"", unit.name, "\": ", to_string(options.strategy.degrees), "\n", wires_of(options));
    UnitSpec spec{unit.name, -1, nullptr, {}};
    for (const int index : unit.flats) {
      const FlatState& state = flats_[static_cast<size_t>(index)];
      spec.flats.push_back({state.flat->slots(), {}, state.flat->dtypes().compute, state.flat->trainable()});
    }
    specs.push_back(std::move(spec));
  }
  return text + tesserae::shard::describe(specs);
}

Statistics Engine::statistics() const {
  Statistics now = *context().statistics;
  now.pool_reserved_bytes = context().pool->reserved_bytes();
  now.pool_misses += context().pool->misses();
  now.allocations += now.pool_misses;
  for (const auto& flat : flats_) {
    now.state_bytes += flat.parameter->state_bytes();
    if (flat.gradient) now.state_bytes += flat.gradient->state_bytes();
  }
  for (const auto& shard : shards_) now.state_bytes += shard.master.numel() * shard.master.element_size();
  return now;
}

}  // namespace tesserae::shard
