#include "tesserae/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/optim/clip.h"

namespace tesserae::optim {

namespace {

double checked_lr(double lr) {
  if (lr >= 0 && std::isfinite(lr)) return lr;
  throw InvalidArgument("Optimizer", cat("the learning rate is ", lr, "; it must be a finite number >= 0"));
}

void check(const StepOptions& options) {
  if (options.lr) checked_lr(*options.lr);
  if (options.clip_norm >= 0) return;
  throw InvalidArgument("Optimizer", cat("clip_norm is ", options.clip_norm, "; it must be >= 0 (0: no clipping)"));
}

void require_real(const shard::ShardList& shards) {
  for (const shard::Shard& shard : shards) {
    if (!shard.master.is_complex()) continue;
    throw InvalidArgument("Optimizer",
                          cat("parameter ", shard.slices.empty() ? "" : shard.slices.front().name,
                              " is complex, which no optimizer here updates; train its torch::view_as_real"));
  }
}

}  // namespace

Optimizer::Optimizer(std::shared_ptr<Target> target, double lr, DecayPolicy decays)
    : target_(std::move(target)), lr_(checked_lr(lr)), decays_(std::move(decays)), states_(target_->shards().size()) {
  if (!decays_) decays_ = decays_if_matrix;
  require_real(target_->shards());
  companion_ = target_->add_companion(*this);
}

void Optimizer::set_lr(double lr) {
  lr_ = checked_lr(lr);
}

void Optimizer::end() noexcept {
  try {
    complete_updates();
  } catch (const std::exception& error) {
    log(LogLevel::error, cat("an update that was still to be made failed: ", error.what()));
  }
}

void Optimizer::complete_updates() {
  if (std::exchange(deferred_, false)) target_->complete_updates();
}

void Optimizer::keep_up() {
  complete_updates();  // they read states_ from another thread
  states_.resize(target_->shards().size());
}

StepResult Optimizer::step(const StepOptions& options) {
  const at::NoGradGuard no_grad;
  check(options);
  complete_updates();
  const bool host_decides =
      options.measure_norm || options.scaler != nullptr || options.also_sum != nullptr || options.accept;
  if (options.clip_norm > 0 && !host_decides && target_->device()) {
    clip_on_device(options);
    return last_step_;
  }
  double norm = 0;
  if (options.measure_norm || options.clip_norm > 0 || options.scaler != nullptr) {
    norm = global_norm(*target_, 2, options.also_sum) / (options.scaler != nullptr ? options.scaler->scale() : 1.0);
  }
  return finish(norm, options, /*publish=*/true);
}

StepResult Optimizer::finish_step(double norm, const StepOptions& options) {
  const at::NoGradGuard no_grad;
  complete_updates();
  return finish(norm, options, /*publish=*/false);
}

StepResult Optimizer::finish(double norm, const StepOptions& options, bool publish) {
  ++steps_done_;
  const StepResult result = last_step_ = {.norm = norm, .skipped = !std::isfinite(norm)};
  double divisor = options.scaler != nullptr ? options.scaler->scale() : 1.0;
  if (options.scaler != nullptr) options.scaler->update(!result.skipped);
  if (result.skipped) return result;
  if (options.accept && !options.accept(norm)) {
    last_step_.skipped = true;
    return last_step_;
  }
  if (options.clip_norm > 0) divisor /= clip_coefficient(norm, options.clip_norm);
  update_all(scale_by(divisor), options, publish);
  return result;
}

// The same arithmetic as clip_coefficient(), by kernels.
void Optimizer::clip_on_device(const StepOptions& options) {
  const at::Tensor norm = norm_on_device(*target_), finite = norm.isfinite();
  ++steps_done_;
  last_step_ = {};
  const at::Tensor divisor = norm.add(1e-6).div_(options.clip_norm).clamp_min_(1.0);
  update_all({.divisor = at::where(finite, divisor, at::ones_like(divisor)).to(at::kFloat),
              .skip = finite.logical_not().to(at::kFloat)},
             options, /*publish=*/true);
}

Optimizer::Scale Optimizer::scale_by(double divisor) const {
  const auto& shards = target_->shards();
  const auto first = std::ranges::find_if(shards, [](const shard::Shard& shard) { return shard.grad.defined(); });
  if (divisor == 1.0 || first == shards.end()) return {};
  return {.divisor = at::full({}, divisor, first->master.options().dtype(at::kFloat))};
}

void Optimizer::update_all(const Scale& scale, const StepOptions& options, bool publish) {
  const auto& shards = target_->shards();
  keep_up();
  std::vector<size_t> updated;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& shard = shards[i];
    if (!shard.grad.defined()) continue;
    if (!states_[i].step.defined()) allocate(shard, states_[i]);
    refresh_views(shard, states_[i]);
    updated.push_back(i);
  }
  std::exception_ptr lost;
  for (size_t k = 0; k < updated.size(); ++k) {
    const size_t i = updated[k];
    const auto next = k + 1 < updated.size() ? std::optional(updated[k + 1]) : std::nullopt;
    const auto update_now = [this, i, next, lr = options.lr.value_or(lr_), keep = options.keep_gradients, scale] {
      update_shard(i, next, lr, keep, scale);
    };
    const bool later = publish && !lost && states_[i].paged;
    if (!later) update_now();
    if (!publish || lost) continue;
    try {
      if (later) {
        deferred_ = true;
        target_->update_later(shards[i].index, update_now);
      } else {
        target_->publish(shards[i].index);
      }
    } catch (...) {
      if (later) update_now();
      lost = std::current_exception();  // every shard is of this step before anybody hears of it
    }
  }
  if (lost) std::rethrow_exception(lost);
}

// Run by run, the next one on its way: also that of shard `next`, which will follow.
void Optimizer::update_shard(size_t index, std::optional<size_t> next, double lr, bool keep_gradients,
                             const Scale& scale) {
  const at::NoGradGuard no_grad;
  const std::scoped_lock lock(updating_);
  const auto gradients = keep_gradients ? offload::Access::update : offload::Access::consume;
  State& state = states_[index];
  state.step.add_(1);
  if (scale.skip) state.step.sub_(*scale.skip);
  offload::Use use;
  for (size_t i = 0; i < state.runs.size(); ++i) {
    const Run& run = state.runs[i];
    // Ends the use of the run before once this one is there: they have blocks in common.
    if (run.paged) use = run.use(gradients);
    if (i + 1 < state.runs.size()) {
      state.runs[i + 1].prefetch();
    } else if (next && !states_[*next].runs.empty()) {
      states_[*next].runs.front().prefetch();
    }
    update(run.views, run.decay, lr, scale);
  }
  if (keep_gradients) return;
  state.runs.clear();  // their views would keep the gradients' memory
  state.places.clear();
}

void Optimizer::Run::prefetch() const {
  if (!paged) return;
  const auto all = [](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) offload::prefetch(tensor);
  };
  all(views.master);
  all(views.grad);
  for (const auto& state : views.state) all(state);
}

offload::Use Optimizer::Run::use(offload::Access gradients) const {
  prefetch();
  offload::Use use;
  for (const at::Tensor& tensor : views.master) use.add(tensor, offload::Access::update);
  for (const at::Tensor& tensor : views.grad) use.add(tensor, gradients);
  for (const auto& state : views.state) {
    for (const at::Tensor& tensor : state) use.add(tensor, offload::Access::update);
  }
  return use;
}

void Optimizer::visit_state(
    const std::function<void(const shard::Shard& shard, std::string_view name, at::Tensor& tensor)>& visit) {
  keep_up();
  const auto& shards = target_->shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& state = states_[i];
    if (!state.step.defined()) continue;
    for (size_t k = 0; k < state.flat.size(); ++k) visit(shards[i], state_names()[k], state.flat[k]);
    visit(shards[i], "step", state.step);
    state.places.clear();
  }
}

int64_t Optimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const State& state : states_) {
    for (const at::Tensor& tensor : state.flat) {
      if (!offload::is_paged(tensor)) bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

std::vector<c10::ScalarType> Optimizer::dtypes(const shard::Shard& shard) {
  keep_up();
  std::vector<c10::ScalarType> found;
  for (const auto& tensor : states_[static_cast<size_t>(shard.index)].flat) found.push_back(tensor.scalar_type());
  return found;
}

std::vector<at::Tensor> Optimizer::take(const shard::Shard& shard) {
  keep_up();
  State& state = states_[static_cast<size_t>(shard.index)];
  state.runs.clear();
  state.places.clear();
  return std::exchange(state.flat, {});
}

void Optimizer::put(const shard::Shard& shard, std::vector<at::Tensor> tensors) {
  keep_up();
  State& state = states_[static_cast<size_t>(shard.index)];
  state.flat = std::move(tensors);
  // Where the state has left the device, or come back.
  if (state.step.defined()) state.step = state.step.to(shard.master.device());
}

void Optimizer::allocate_state() {
  keep_up();
  const auto& shards = target_->shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (!states_[i].step.defined() && shards[i].master.defined()) allocate(shards[i], states_[i]);
  }
}

void Optimizer::allocate(const shard::Shard& shard, State& state) const {
  const autograd::OrdinaryTensors ordinary;
  for (size_t k = 0; k < state_names().size(); ++k) state.flat.push_back(target_->new_state(shard));
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
  std::vector<at::Tensor> tensors = state.flat;
  tensors.insert(tensors.end(), {shard.master, shard.grad});
  const bool paged = state.paged = std::ranges::any_of(tensors, offload::is_paged);
  state.runs.clear();
  if (!paged) state.runs = {{.decay = false}, {.decay = true}};
  for (const auto& segment : segments(shard, decays_)) {
    if (!paged) {
      add_run(shard, state, segment, state.runs[segment.decay ? 1 : 0]);
      continue;
    }
    // Cut as seen from the segment's begin, in multiples of what kernels take at once: then each element is computed by
    // the same instructions as where nothing is paged, to the last bit.
    const auto length = static_cast<int64_t>(offload::PagedMemory::block / shard.master.element_size());
    for (int64_t begin = segment.begin; begin < segment.end; begin += length) {
      const Segment part{begin, std::min(begin + length, segment.end), segment.decay};
      state.runs.push_back({.decay = segment.decay, .paged = true});
      add_run(shard, state, part, state.runs.back());
    }
  }
  std::erase_if(state.runs, [](const Run& run) { return run.views.master.empty(); });
  state.places = std::move(places);
}

void Optimizer::add_run(const shard::Shard& shard, const State& state, const Segment& segment, Run& run) const {
  run.views.state.resize(state.flat.size());
  run.views.master.push_back(shard.master.slice(0, segment.begin, segment.end));
  run.views.grad.push_back(shard.grad.slice(0, segment.begin, segment.end));
  for (size_t k = 0; k < state.flat.size(); ++k) {
    run.views.state[k].push_back(state.flat[k].slice(0, segment.begin, segment.end));
  }
  run.views.step.push_back(state.step);
}

}  // namespace tesserae::optim
