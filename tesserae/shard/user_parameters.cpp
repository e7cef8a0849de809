#include "tesserae/shard/user_parameters.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"

namespace tesserae::shard {

size_t index_of(const FlatBuffer& buffer) {
  const auto& buffers = buffer.unit().buffers();
  const auto same = [&buffer](const auto& other) { return other.get() == &buffer; };
  return static_cast<size_t>(std::ranges::find_if(buffers, same) - buffers.begin());
}

std::shared_ptr<UserParameters> UserParameters::attach(ShardedUnit& unit,
                                                       const std::vector<std::vector<at::Tensor>>& parameters) {
  std::vector<UserTensors> all;
  for (const auto& tensors : parameters) all.push_back(plain_tensors(tensors));
  return attach(unit, std::move(all));
}

std::shared_ptr<UserParameters> UserParameters::attach(ShardedUnit& unit, std::vector<UserTensors> parameters) {
  if (parameters.size() != unit.buffers().size()) {
    throw InvalidArgument("UserParameters", cat(parameters.size(), " lists of parameters for the ",
                                                unit.buffers().size(), " flat buffers of unit \"", unit.name(), "\""));
  }
  const std::shared_ptr<UserParameters> shown(new UserParameters(std::move(parameters)));
  shown->local_.resize(unit.buffers().size());
  for (size_t i = 0; i < unit.buffers().size(); ++i) shown->show(*unit.buffers()[i], i);
  unit.attach(shown);
  return shown;
}

void UserParameters::show(FlatBuffer& buffer, size_t index) {
  local_[index] =
      std::make_unique<LocalParameters>(buffer.flat(), buffer.parameter(), buffer.gradient(), parameters_[index]);
  local_[index]->show_values();
}

void UserParameters::begin_step(ShardedUnit& unit, bool accumulating) {
  take_values(unit);
  show_requires_grad(unit);
  // Between micro-batches nobody updates; who evaluates there may have put other values in, and these back.
  if (accumulating && at::GradMode::is_enabled() && !evaluated_) return;
  if (!accumulating && unit.context().pool().elastic()) {
    // The memory of gradients that the user has let go.
    for (size_t i = 0; i < local_.size(); ++i) {
      FlatBuffer& buffer = *unit.buffers()[i];
      if (buffer.gradient() == nullptr || local_[i]->any_gradient()) continue;
      buffer.gradient()->zero();
      buffer.gradient()->give_back();
      local_[i]->show_gradients(*buffer.shard());
    }
  }
  waits_ = unit.follows();
  if (!waits_) publish(unit);
}

void UserParameters::begin_alone(ShardedUnit& unit) {
  take_values(unit);
  show_requires_grad(unit);
  waits_ = unit.follows();
  if (!waits_) publish(unit);
}

// An average of other weights, as of a momentum encoder, is written in the forward of the model.
void UserParameters::before_forward(ShardedUnit& unit) {
  if (!std::exchange(waits_, false)) return;
  take_values(unit);
  publish(unit);
}

void UserParameters::publish(ShardedUnit& unit) {
  if (unit.gathered_early()) return;
  unit.publish();
  evaluated_ = !unit.follows() && !at::GradMode::is_enabled() && !autograd::in_backward();
}

void UserParameters::show_requires_grad(ShardedUnit& unit) {
  if (shows_computed_) return;
  for (size_t i = 0; i < local_.size(); ++i) of(i).show_requires_grad(unit.buffers()[i]->tensors(), /*freezes=*/true);
}

// What was frozen for a later forward (of reference logits, or of a critic that is not trained by it) and is not any
// more: autograd would drop its gradients of this backward.
void UserParameters::show_thawed(ShardedUnit& unit) {
  if (shows_computed_) return;
  for (size_t i = 0; i < local_.size(); ++i) {
    const FlatBuffer& buffer = *unit.buffers()[i];
    if (buffer.gradient() != nullptr && local_[i]) local_[i]->show_requires_grad(buffer.tensors(), /*freezes=*/false);
  }
}

void UserParameters::begin_backward(ShardedUnit& unit, bool boundary) {
  show_thawed(unit);
  if (evaluated_) {
    take_values(unit);
    publish(unit);
  }
  if (!boundary) return;
  take_gradients(unit);
  for (size_t i = 0; i < local_.size(); ++i) {
    if (unit.buffers()[i]->shard() != nullptr && local_[i]) local_[i]->hide_gradients();
  }
}

void UserParameters::before_reduce(FlatBuffer& buffer) {
  if (LocalParameters* const local = local_[index_of(buffer)].get()) local->expect_reduction();
}

void UserParameters::take_values(ShardedUnit& /*unit*/) {
  for (const auto& local : local_) {
    if (local) local->take_values();
  }
}

void UserParameters::take_gradients(ShardedUnit& unit) {
  for (size_t i = 0; i < local_.size(); ++i) {
    Shard* const shard = unit.buffers()[i]->shard();
    if (shard != nullptr && local_[i]) local_[i]->take_gradients(*shard);
  }
}

void UserParameters::show_gradients(ShardedUnit& unit) {
  for (size_t i = 0; i < local_.size(); ++i) {
    Shard* const shard = unit.buffers()[i]->shard();
    if (shard != nullptr && local_[i]) local_[i]->show_gradients(*shard);
  }
}

void UserParameters::before_recut(FlatBuffer& buffer) {
  local_[index_of(buffer)].reset();
}

void UserParameters::after_recut(FlatBuffer& buffer) {
  const size_t index = index_of(buffer);
  show(buffer, index);
  if (buffer.shard() != nullptr) local_[index]->show_gradients(*buffer.shard());
}

void UserParameters::after_cast(FlatBuffer& buffer) {
  local_[index_of(buffer)]->show_values();
}

LocalParameters& UserParameters::of(size_t index) const {
  if (local_[index]) return *local_[index];
  throw InvalidArgument("UserParameters", "a change of degrees failed half-way: start again from a checkpoint");
}

}  // namespace tesserae::shard
