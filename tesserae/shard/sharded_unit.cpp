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
namespace {

uint32_t with(uint32_t hash, size_t value) {
  return (hash ^ (static_cast<uint32_t>(value) + 1)) * 16777619u;
}

}  // namespace

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

void ShardedUnit::expect_forward() {
  entering_ = std::make_shared<Call>();
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
    const auto call = entering_ || calls_.empty() ? entering_ : calls_.back();
    watched.register_hook([alive = std::weak_ptr<ShardedUnit*>(alive_), call](const at::TensorBase&) {
      if (const auto unit = alive.lock(); unit && call) (*unit)->end_backward_of(*call);
    });
  }
  return watched;
}

void ShardedUnit::on_output(const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad() || !at::GradMode::is_enabled()) return;
  if (calls_.empty() && !left_) left_ = std::make_shared<Call>();
  const auto& call = calls_.empty() ? left_ : calls_.back();
  call->watched = true;
  output.register_hook([alive = std::weak_ptr<ShardedUnit*>(alive_), call](const at::TensorBase&) {
    if (const auto unit = alive.lock()) (*unit)->begin_backward_of(*call);
  });
}

void ShardedUnit::begin_backward_of(Call& call) {
  if (std::exchange(call.began, backwards_) != backwards_) ++began_;
  engine_->before_backward(*this);
}

// The first of a call's inputs that has its gradient: others may be inputs of other units, too, and come late. Not in a
// backward of other modules that have the same input, nor of a call whose outputs nobody used, nor, beside calls that
// have a graph, of one without.
void ShardedUnit::end_backward_of(Call& call) {
  if (engine_->phase() != Engine::Phase::backward || (!call.recorded && forwards() > 0)) return;
  if (call.watched && call.began != backwards_) return;
  if (std::exchange(call.ended, backwards_) != backwards_) engine_->after_input_gradient(*this);
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
  uint32_t which = 0;
  try {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      FlatParameter& parameter = buffers_[i]->parameter();
      if (parameter.readable() || !parameter.begin_gather()) continue;
      all.push_back(&parameter);
      which = with(which, i);
    }
  } catch (...) {
    forget_gather();
    throw;
  }
  FlatParameter::gather(all, context_, label(which));
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

bool ShardedUnit::follows() const {
  const bool trained = std::ranges::any_of(buffers_, [](const auto& buffer) { return buffer->gradient() != nullptr; });
  return !trained && engine_->shards().size() > 0;
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
  return buffer.gradient()->waits(boundary) || ((boundary || keeps_pieces()) && reduces_unused_ &&
                                                (accumulating_ || engine_->phase() == Engine::Phase::backward));
}

bool ShardedUnit::has_gradients(bool boundary) const {
  return std::ranges::any_of(buffers_, [=, this](const auto& buffer) { return travels(*buffer, boundary); });
}

void ShardedUnit::reduce_gradients(bool boundary) {
  complete_updates();  // of a unit that was not gathered since: the gradients of before are still to be read
  std::vector<FlatGradient*> all;
  uint32_t which = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    FlatBuffer& buffer = *buffers_[i];
    if (!travels(buffer, boundary)) continue;
    tell([&](StepObserver& observer) { observer.before_reduce(buffer); });
    all.push_back(buffer.gradient());
    which = with(which, i);
  }
  FlatGradient::reduce(all, boundary, /*always_whole=*/reduces_unused_, context_, label(which));
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

// Units of a model are of equal size, and so may buffers be: sizes do not tell that ranks mean others.
comm::Label ShardedUnit::label(uint32_t which) const {
  return {name_, context_.statistics().steps, with(static_cast<uint32_t>(std::hash<std::string>()(name_)), which)};
}

// Phases.

void ShardedUnit::enter_forward() {
  phase_ = Phase::forward;
  gathered_early_ = false;
  ++depth_;
  calls_.push_back(entering_ ? std::exchange(entering_, nullptr) : std::make_shared<Call>());
  calls_.back()->recorded = at::GradMode::is_enabled();
  if (calls_.back()->recorded) ++forwards_;
}

void ShardedUnit::leave_forward(bool cancelled) {
  if (cancelled && at::GradMode::is_enabled() && forwards_ > 0) --forwards_;  // it has no backward
  // A root that calls itself has been reset in between.
  if (depth_ > 0) --depth_;
  if (!calls_.empty()) {
    left_ = calls_.back();
    calls_.pop_back();
  }
  if (depth_ == 0) phase_ = Phase::idle;
}

void ShardedUnit::enter_backward() {
  if (depth_ == 0) phase_ = Phase::backward;  // else a forward is around this backward, and goes on
}

bool ShardedUnit::end_call() {
  return ++ended_ >= forwards();
}

bool ShardedUnit::computes_backward() const {
  return began_ > ended_;
}

void ShardedUnit::leave_backward(bool made_graph) {
  phase_ = depth_ > 0 ? Phase::forward : Phase::idle;
  if (!made_graph) {  // else the same calls have another backward
    before_ = forwards();
    forwards_ = 0;
  }
  began_ = ended_ = 0;
  ++backwards_;
  gathered_early_ = false;
}

void ShardedUnit::reset() {
  phase_ = Phase::idle;
  depth_ = 0;
  calls_.clear();
}

void ShardedUnit::cut_short() {
  reset();
  forwards_ = before_ = began_ = ended_ = 0;
}

}  // namespace tesserae::shard
