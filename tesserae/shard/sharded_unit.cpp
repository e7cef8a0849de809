#include "tesserae/shard/sharded_unit.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/lifetime.h"

namespace tesserae::shard {

ShardedUnit::ShardedUnit(Engine& engine, int index, const UnitSpec& spec, UnitContext context)
    : engine_(&engine),
      index_(index),
      name_(spec.name.empty() ? "root" : spec.name),
      handle_(spec.handle),
      context_(std::move(context)),
      alive_(std::make_shared<ShardedUnit*>(this)),
      frees_after_forward_(frees(sharding().options, &mesh::Strategy::free_after_forward)),
      frees_after_backward_(frees(sharding().options, &mesh::Strategy::free_after_backward)) {
  for (const auto& flat : spec.flats) {
    buffers_.push_back(std::make_unique<FlatBuffer>(*this, flat));
  }
  handle_->set_unit(this);
}

ShardedUnit::~ShardedUnit() {
  if (handle_ != nullptr) handle_->set_unit(nullptr);
}

void ShardedUnit::join(Engine& engine, int index, const std::string& prefix, std::shared_ptr<Workspace> workspace) {
  engine_ = &engine;
  index_ = index;
  name_ = name_ == "root" ? prefix : cat(prefix, ".", name_);
  context_.workspace = std::move(workspace);
  for (auto& buffer : buffers_) buffer->rename(prefix);
  if (handle_ != nullptr) handle_->set_unit(this);
}

// Events.

void ShardedUnit::before_forward() {
  engine_->before_forward(*this);
}

void ShardedUnit::after_forward() {
  engine_->after_forward(*this);
}

void ShardedUnit::cancel_forward() {
  engine_->cancel_forward(*this);
}

at::Tensor ShardedUnit::on_input(const at::Tensor& input) {
  at::Tensor watched = input;
  const auto& precision = sharding().options.precision;
  if (precision.cast_inputs && precision.parameters && input.defined() && input.is_floating_point()) {
    watched = input.to(*precision.parameters);
  }
  // A forward that is recomputed is watched since the first time, unless that kept no graph.
  const bool seen = forwards_ > 0 && autograd::in_backward();
  if (watched.defined() && watched.requires_grad() && !watched.is_leaf() && !seen) {
    watched.register_hook([alive = std::weak_ptr<ShardedUnit*>(alive_)](const at::TensorBase&) {
      if (const auto unit = alive.lock()) (*unit)->engine().after_input_gradient(**unit);
    });
  }
  return watched;
}

void ShardedUnit::on_output(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad() || !at::GradMode::is_enabled()) return;
  output.register_hook([alive = std::weak_ptr<ShardedUnit*>(alive_)](const at::TensorBase&) {
    if (const auto unit = alive.lock()) (*unit)->engine().before_backward(**unit);
  });
}

// Parameters.

void ShardedUnit::update_later(FlatBuffer& buffer, std::function<void()> update) {
  // One that was not gathered since has been updated by now: whoever updates again completes what was before.
  std::erase_if(waiting_, [&](const Update& earlier) { return earlier.buffer == &buffer; });
  waiting_.push_back({&buffer, std::make_shared<DeferredUpdate>(std::move(update))});
}

void ShardedUnit::forget_updates() {
  complete_updates();
  waiting_.clear();
}

void ShardedUnit::complete_updates() {
  for (const Update& update : begun_) update.run->run();
  for (const Update& update : waiting_) update.run->run();
  begun_.clear();
}

void ShardedUnit::begin_updates() {
  if (waiting_.empty()) return;
  begun_ = std::exchange(waiting_, {});
  const auto ticket = sharding().gather_lane.submit([updates = begun_] {
    for (const Update& update : updates) update.run->run();
  });
  std::vector<FlatParameter*> changed;
  for (const Update& update : begun_) {
    changed.push_back(&update.buffer->parameter());
    changed.back()->refreshes_with(ticket);  // of those that are whole anyway, all that there is to wait for
  }
  publish(changed);
}

void ShardedUnit::start_gather() {
  begin_updates();
  std::vector<FlatParameter*> all;
  try {
    for (const auto& buffer : buffers_) {
      FlatParameter& parameter = buffer->parameter();
      if (!parameter.readable() && parameter.begin_gather()) all.push_back(&parameter);
    }
  } catch (...) {
    forget_gather();
    throw;
  }
  FlatParameter::gather(all, context_, label());
}

void ShardedUnit::finish_gather() {
  try {
    for (const auto& buffer : buffers_) buffer->parameter().finish_gather();
  } catch (...) {
    forget_gather();
    throw;
  }
}

// Also inside the unit's forward, which will not come to its end.
void ShardedUnit::forget_gather() {
  for (const auto& buffer : buffers_) buffer->parameter().free();
  gathered_early_ = false;
  tell([this](StepObserver& observer) { observer.after_free(*this); });
}

bool ShardedUnit::holds_buffers() const {
  return std::ranges::any_of(buffers_, [](const auto& buffer) { return buffer->parameter().holds_buffer(); });
}

bool ShardedUnit::holds_newest() const {
  return waiting_.empty() && std::ranges::all_of(buffers_, [](const auto& buffer) {
           return buffer->parameter().readable() || buffer->parameter().arriving();
         });
}

bool ShardedUnit::arriving() const {
  return std::ranges::any_of(buffers_, [](const auto& buffer) { return buffer->parameter().arriving(); });
}

bool ShardedUnit::lacks_buffers() const {
  return std::ranges::any_of(buffers_, [](const auto& buffer) {
    return buffer->parameter().buffer_bytes() > 0 && !buffer->parameter().holds_buffer();
  });
}

void ShardedUnit::rest() {
  if (rest_group_ == nullptr) return;
  for (const auto& buffer : buffers_) buffer->parameter().rest(*rest_group_);
}

void ShardedUnit::free(bool keep) {
  for (const auto& buffer : buffers_) free(*buffer, keep);
}

void ShardedUnit::free_frozen(bool keep) {
  for (const auto& buffer : buffers_) {
    if (buffer->gradient() == nullptr) free(*buffer, keep);
  }
}

void ShardedUnit::free(FlatBuffer& buffer, bool keep) {
  if (!buffer.parameter().holds_buffer()) return;
  if (phase_ == Phase::forward) {
    throw std::logic_error(cat("[ShardedUnit::free] unit \"", name_, "\" is computing with its parameters"));
  }
  buffer.parameter().free(keep);
  gathered_early_ = false;
  if (!holds_buffers()) tell([this](StepObserver& observer) { observer.after_free(*this); });
}

void ShardedUnit::publish() {
  std::vector<FlatParameter*> all;
  for (const auto& buffer : buffers_) all.push_back(&buffer->parameter());
  publish(all);
}

void ShardedUnit::publish(const std::vector<FlatParameter*>& parameters) {
  std::vector<FlatParameter*> all;
  for (FlatParameter* parameter : parameters) {
    if (parameter->begin_publish()) all.push_back(parameter);
  }
  FlatParameter::refresh(all, context_, label());
}

// Gradients.

bool ShardedUnit::has_all_gradients() const {
  return std::ranges::all_of(
      buffers_, [](const auto& buffer) { return buffer->gradient() == nullptr || buffer->gradient()->complete(); });
}

bool ShardedUnit::travels(const FlatBuffer& buffer, bool boundary) const {
  if (buffer.gradient() == nullptr) return false;
  return buffer.gradient()->waits(boundary) ||
         ((boundary || keeps_pieces()) && reduces_unused_ && engine_->phase() == Engine::Phase::backward);
}

bool ShardedUnit::has_gradients(bool boundary) const {
  return std::ranges::any_of(buffers_, [=, this](const auto& buffer) { return travels(*buffer, boundary); });
}

void ShardedUnit::reduce_gradients(bool boundary) {
  complete_updates();  // of a unit that was not gathered since: the gradients of before are still to be read
  std::vector<FlatGradient*> all;
  for (const auto& buffer : buffers_) {
    if (!travels(*buffer, boundary)) continue;
    tell([&](StepObserver& observer) { observer.before_reduce(*buffer); });
    all.push_back(buffer->gradient());
  }
  FlatGradient::reduce(all, boundary, /*always_whole=*/reduces_unused_, context_, label());
}

bool ShardedUnit::reducing() const {
  return std::ranges::any_of(
      buffers_, [](const auto& buffer) { return buffer->gradient() != nullptr && buffer->gradient()->reducing(); });
}

bool ShardedUnit::reduced() const {
  return std::ranges::all_of(
      buffers_, [](const auto& buffer) { return buffer->gradient() == nullptr || buffer->gradient()->reduced(); });
}

void ShardedUnit::finish_reducing() {
  for (const auto& buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->finish();
  }
}

void ShardedUnit::zero_grad() {
  tell([&](StepObserver& observer) { observer.take_gradients(*this); });  // also what a backward that threw has left
  for (const auto& buffer : buffers_) {
    if (buffer->gradient() == nullptr) continue;
    buffer->gradient()->zero();
    buffer->gradient()->give_back();
  }
  set_accumulating(false);
  tell([&](StepObserver& observer) { observer.show_gradients(*this); });
}

comm::Label ShardedUnit::label() const {
  return {name_, context_.statistics().steps};
}

// Phases.

void ShardedUnit::enter_forward() {
  phase_ = Phase::forward;
  gathered_early_ = false;
  ++depth_;
  if (at::GradMode::is_enabled()) ++forwards_;
}

void ShardedUnit::leave_forward() {
  // A root that calls itself has been reset in between.
  if (depth_ > 0) --depth_;
  if (depth_ == 0) phase_ = Phase::idle;
}

void ShardedUnit::enter_backward() {
  if (depth_ == 0) phase_ = Phase::backward;  // else a forward is around this backward, and goes on
}

// An input that another call or unit also has may come late and count once more: what is freed too early for that is
// gathered again.
bool ShardedUnit::end_call() {
  return ++ended_ >= forwards();
}

void ShardedUnit::leave_backward(bool made_graph) {
  phase_ = depth_ > 0 ? Phase::forward : Phase::idle;
  if (!made_graph) {  // else the same calls have another backward
    before_ = forwards();
    forwards_ = 0;
  }
  ended_ = 0;
  gathered_early_ = false;
}

void ShardedUnit::reset() {
  phase_ = Phase::idle;
  depth_ = 0;
}

void ShardedUnit::cut_short() {
  reset();
  forwards_ = before_ = ended_ = 0;
}

}  // namespace tesserae::shard
