#include "tesserae/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <exception>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/optim/clip.h"

namespace tesserae::optim {

Optimizer::Optimizer(std::shared_ptr<Target> target, double lr, DecayPolicy decays)
    : target_(std::move(target)), lr_(lr), decays_(std::move(decays)), states_(target_->shards().size()) {
  if (!decays_) decays_ = decays_if_matrix;
  companion_ = target_->add_companion(*this);
}

StepResult Optimizer::step(const StepOptions& options) {
  const at::NoGradGuard no_grad;
  double norm = 0;
  if (options.measure_norm || options.clip_norm > 0 || options.scaler != nullptr) {
    norm = global_norm(*target_, 2, options.also_sum) / (options.scaler != nullptr ? options.scaler->scale() : 1.0);
  }
  return finish(norm, options, /*publish=*/true);
}

StepResult Optimizer::finish_step(double norm, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  return finish(norm, options, /*publish=*/false);
}

StepResult Optimizer::finish(double norm, const StepOptions& options, bool publish) {
  ++steps_done_;
  const StepResult result = last_step_ = {.norm = norm, .skipped = !std::isfinite(norm)};
  double divisor = options.scaler != nullptr ? options.scaler->scale() : 1.0;
  if (options.scaler != nullptr) options.scaler->update(!result.skipped);
  if (result.skipped) return result;
  if (options.clip_norm > 0) divisor /= clip_coefficient(norm, options.clip_norm);

  const auto& shards = target_->shards();
  states_.resize(shards.size());
  std::optional<at::Tensor> divisor_tensor;
  std::exception_ptr lost;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& shard = shards[i];
    auto& state = states_[i];
    if (!shard.grad.defined()) continue;
    if (divisor != 1.0 && !divisor_tensor.has_value()) {
      divisor_tensor = at::full({}, divisor, shard.master.options().dtype(at::kFloat));
    }
    if (!state.step.defined()) allocate(shard, state);
    refresh_views(shard, state);
    state.step.add_(1);
    for (const bool decay : {false, true}) {
      const auto& views = state.views[decay];
      if (!views.master.empty()) update(views, decay, options.lr.value_or(lr_), divisor_tensor);
    }
    if (!publish || lost) continue;
    try {
      target_->publish(shard.index);
    } catch (...) {
      lost = std::current_exception();  // every shard is of this step before anybody hears of it
    }
  }
  if (lost) std::rethrow_exception(lost);
  return result;
}

void Optimizer::visit_state(
    const std::function<void(const shard::Shard& shard, std::string_view name, at::Tensor& tensor)>& visit) {
  const auto& shards = target_->shards();
  states_.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& state = states_[i];
    if (!state.step.defined()) continue;
    for (size_t k = 0; k < state.flat.size(); ++k) visit(shards[i], state_names()[k], state.flat[k]);
    visit(shards[i], "step", state.step);
    state.places.clear();
  }
}

std::vector<c10::ScalarType> Optimizer::dtypes(const shard::Shard& shard) {
  std::vector<c10::ScalarType> found;
  for (const auto& tensor : states_[static_cast<size_t>(shard.index)].flat) found.push_back(tensor.scalar_type());
  return found;
}

std::vector<at::Tensor> Optimizer::take(const shard::Shard& shard) {
  State& state = states_[static_cast<size_t>(shard.index)];
  for (auto& views : state.views) views = Views();
  state.places.clear();
  return std::exchange(state.flat, {});
}

void Optimizer::put(const shard::Shard& shard, std::vector<at::Tensor> tensors) {
  states_[static_cast<size_t>(shard.index)].flat = std::move(tensors);
}

void Optimizer::allocate_state() {
  const auto& shards = target_->shards();
  states_.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (!states_[i].step.defined() && shards[i].master.defined()) allocate(shards[i], states_[i]);
  }
}

void Optimizer::allocate(const shard::Shard& shard, State& state) const {
  for (size_t k = 0; k < state_names().size(); ++k) state.flat.push_back(at::zeros_like(shard.master));
  state.step = at::zeros({}, shard.master.options().dtype(at::kFloat));
}

void Optimizer::refresh_views(const shard::Shard& shard, State& state) const {
  std::vector<std::pair<const void*, int64_t>> places;
  auto add = [&places](const at::Tensor& tensor) { places.emplace_back(tensor.const_data_ptr(), tensor.numel()); };
  add(shard.master);
  add(shard.grad);
  for (const auto& flat : state.flat) add(flat);
  if (places == state.places) return;

  for (size_t k = 0; k < state.flat.size(); ++k) {
    if (state.flat[k].numel() == shard.master.numel()) continue;
    throw InvalidArgument(
        "Optimizer::step",
        cat("state \"", state_names()[k], "\" of shard ", shard.index, " has ", state.flat[k].numel(),
            " elements and its master ", shard.master.numel(), "; move the state when the shards are cut anew"));
  }
  for (auto& views : state.views) {
    views = Views();
    views.state.resize(state.flat.size());
  }
  for (const auto& segment : segments(shard, decays_)) {
    auto& views = state.views[segment.decay];
    views.master.push_back(shard.master.slice(0, segment.begin, segment.end));
    views.grad.push_back(shard.grad.slice(0, segment.begin, segment.end));
    for (size_t k = 0; k < state.flat.size(); ++k) {
      views.state[k].push_back(state.flat[k].slice(0, segment.begin, segment.end));
    }
    views.step.push_back(state.step);
  }
  state.places = std::move(places);
}

}  // namespace tesserae::optim
