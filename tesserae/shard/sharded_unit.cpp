#include "tesserae/shard/sharded_unit.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/several.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/user_collectives.h"

namespace tesserae::shard {

namespace {

// What was offloaded so that it need not be in memory is freed, whatever the strategy keeps.
bool comes_from_disk(const Options& options) {
  return options.tiers.parameters == offload::Tier::disk;
}

// What the user's code throws is this step's error, not the lane's.
void run_users(UserCollective& collective, const std::vector<at::Tensor>& buffers, const comm::Group& group,
               std::exception_ptr& failure) {
  try {
    collective.run(buffers, group.rank(), group.size());
  } catch (const comm::CommError&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
}

}  // namespace

ShardedUnit::ShardedUnit(Engine& engine, int index, const UnitSpec& spec, UnitContext context)
    : engine_(&engine),
      index_(index),
      name_(spec.name.empty() ? "root" : spec.name),
      handle_(spec.handle),
      context_(std::move(context)),
      alive_(std::make_shared<ShardedUnit*>(this)),
      frees_after_forward_(sharding().options.strategy.free_after_forward || comes_from_disk(sharding().options)),
      frees_after_backward_(sharding().options.strategy.free_after_backward || comes_from_disk(sharding().options)) {
  for (const auto& flat : spec.flats) {
    buffers_.push_back(std::make_unique<FlatBuffer>(*this, flat));
    has_frozen_ = has_frozen_ || !flat.trainable;
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
  if (has_frozen_ && watched.defined() && watched.requires_grad() && !watched.is_leaf()) {
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
  if (all.empty()) return;
  const auto failure = std::make_shared<std::exception_ptr>();
  const auto ticket = sharding().gather_lane.submit(
      [all, failure, sharding = context_.sharding, gatherer = context_.gatherer, label = label()] {
        std::vector<at::Tensor> travelling, resting;
        comm::Group& group = sharding->parameter_group;
        comm::Group* rest_group = nullptr;
        bool shared = false;
        const bool users = gatherer != nullptr && group.size() > 1;
        for (FlatParameter* parameter : all) {
          if (ExtendedGather* extension = parameter->extension()) {
            const std::vector<at::Tensor>& buffers = extension->write_inputs();
            if (users) {
              travelling.insert(travelling.end(), buffers.begin(), buffers.end());
            } else {
              comm::all_gather(extension->group(), buffers, label);  // whatever the wire: they chose what travels
            }
            continue;
          }
          parameter->write_piece();
          shared = shared || parameter->shared();
          if (parameter->shared()) continue;
          comm::Group* const group = parameter->resting_group();
          (group != nullptr ? resting : travelling).push_back(parameter->whole());
          if (group != nullptr) rest_group = group;
        }
        if (shared) group.barrier(label);
        if (rest_group != nullptr)
          comm::all_gather(*rest_group, resting, label);  // was rounded when it first travelled
        if (users && !travelling.empty()) {
          run_users(*gatherer, travelling, group, *failure);
        } else {
          comm::all_gather(group, travelling, label, sharding->options.parameter_wire);
        }
      });
  for (FlatParameter* parameter : all) parameter->travels_with(ticket, failure);
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
  if (all.empty()) return;
  const auto ticket = sharding().gather_lane.submit([all, sharding = context_.sharding, label = label()] {
    std::vector<at::Tensor> pieces;
    for (FlatParameter* parameter : all) pieces.push_back(parameter->write_chunk());
    const offload::Use use(pieces, offload::Access::update);
    comm::all_gather(sharding->refresh_group, pieces, label, sharding->options.parameter_wire);
  });
  for (FlatParameter* parameter : all) parameter->refreshes_with(ticket);
}

// Gradients.

bool ShardedUnit::has_all_gradients() const {
  return std::ranges::all_of(
      buffers_, [](const auto& buffer) { return buffer->gradient() == nullptr || buffer->gradient()->complete(); });
}

bool ShardedUnit::travels(const FlatBuffer& buffer, bool boundary) const {
  if (buffer.gradient() == nullptr) return false;
  return buffer.gradient()->waits(boundary) ||
         (boundary && reduces_unused_ && engine_->phase() == Engine::Phase::backward);
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
  FlatGradient::reduce(all, boundary, context_, label());
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

void ShardedUnit::leave_backward() {
  phase_ = depth_ > 0 ? Phase::forward : Phase::idle;
  forwards_ = 0;
  gathered_early_ = false;
}

void ShardedUnit::reset() {
  phase_ = Phase::idle;
  depth_ = 0;
}

void ShardedUnit::cut_short() {
  reset();
  forwards_ = 0;
}

// Options that change.

namespace {

// What a lifetime becomes: that of the strategy where that changes, else what the script has made of it.
bool lifetime_after(bool frees, const Options& before, const Options& now, bool mesh::Strategy::*lifetime) {
  const bool always = comes_from_disk(now);
  if (always == comes_from_disk(before) && before.strategy.*lifetime == now.strategy.*lifetime) return frees;
  return always || now.strategy.*lifetime;
}

}  // namespace

bool ShardedUnit::would_free_after_forward(const Sharding& next) const {
  return lifetime_after(frees_after_forward_, sharding().options, next.options, &mesh::Strategy::free_after_forward);
}

void ShardedUnit::set_sharding(std::shared_ptr<const Sharding> sharding) {
  const Options &before = this->sharding().options, &now = sharding->options;
  frees_after_forward_ = would_free_after_forward(*sharding);
  frees_after_backward_ = lifetime_after(frees_after_backward_, before, now, &mesh::Strategy::free_after_backward);
  context_.sharding = std::move(sharding);
  set_rest_ranks(rest_ranks_);
}

void ShardedUnit::set_rest_ranks(int ranks) {
  rest_ranks_ = ranks;
  rest_group_ = nullptr;
  const comm::Group& all = sharding().parameter_group;
  const int some = std::gcd(ranks, all.size());
  if (ranks == 0 || some == 1 || some == all.size()) return;
  // By rank in the fabric: the group's members are ranks of the job.
  comm::Fabric& fabric = *sharding().fabric;
  const std::vector<int> members = sharding().layout.parameter_group(fabric.rank());
  const auto begin = members.begin() + all.rank() / some * some;
  rest_group_ = fabric.borrow({begin, begin + some}, comm::Traffic::gather);
}

void ShardedUnit::set_gatherer(std::shared_ptr<UserCollective> gatherer) {
  const auto shared = [](const auto& buffer) { return buffer->parameter().shared(); };
  if (gatherer != nullptr && std::ranges::any_of(buffers_, shared)) {
    throw InvalidArgument("set_custom_all_gather",
                          cat("unit \"", name_,
                              "\" has run a step already, and its ranks share the gathered "
                              "parameters in memory: nothing travels. Call it before the first forward"));
  }
  context_.gatherer = std::move(gatherer);
}

void ShardedUnit::set_lifetimes(bool free_after_forward, bool free_after_backward) {
  frees_after_forward_ = free_after_forward;
  frees_after_backward_ = free_after_backward;
}

void ShardedUnit::set_master_dtype(c10::ScalarType dtype) {
  if (engine_->prepared() || !c10::isFloatingType(dtype)) {
    throw InvalidArgument(
        "ShardedUnit::set_master_dtype",
        cat(c10::toString(dtype), " for unit \"", name_, "\"",
            engine_->prepared() ? ", which has run a step already: change dtypes before the first forward"
                                : ": masters are floating-point numbers"));
  }
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers_) {
    if (buffer->shard() == nullptr || buffer->flat().dtypes().master == dtype) continue;
    buffer->set_master_dtype(dtype);
    ++context_.statistics().allocations;
    tell([&](StepObserver& observer) { observer.after_cast(*buffer); });
  }
}

void ShardedUnit::set_gradient_divisor(double divisor) {
  if (!(divisor > 0)) {
    throw InvalidArgument("ShardedUnit::set_gradient_divisor",
                          cat(divisor, " for unit \"", name_, "\": it must be above 0"));
  }
  context_.gradient_divisor = divisor;
  for (const auto& buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->update_average_factor();
  }
}

void ShardedUnit::attach(std::shared_ptr<StepObserver> observer) {
  if (observer->reduces()) {
    if (context_.reducer != nullptr) {
      throw InvalidArgument("ShardedUnit::attach",
                            cat("unit \"", name_, "\" has a hook in place of its reduction already; detach it first"));
    }
    if (!allows_reducer(sharding().layout)) {
      throw InvalidArgument("ShardedUnit::attach", cat("a hook in place of the reduction of unit \"", name_, "\" with ",
                                                       to_string(sharding().layout.degrees()),
                                                       ": all three degrees must be 1 or ", sharding().layout.ranks()));
    }
    if (sharding().options.accumulation == Accumulation::two_hop) {
      throw InvalidArgument("ShardedUnit::attach",
                            cat("a hook in place of the reduction of unit \"", name_,
                                "\" with Accumulation::two_hop, which reduces over G before it: use local"));
    }
    context_.reducer = observer;
  }
  if (observer->adjusts()) {
    if (context_.adjuster != nullptr) {
      throw InvalidArgument("ShardedUnit::attach",
                            cat("unit \"", name_, "\" has a hook on its averages already; detach it first"));
    }
    context_.adjuster = observer;
  }
  observers_.push_back(std::move(observer));
}

void ShardedUnit::detach(const StepObserver& observer) {
  if (context_.reducer.get() == &observer) context_.reducer = nullptr;
  if (context_.adjuster.get() == &observer) context_.adjuster = nullptr;
  std::erase_if(observers_, [&observer](const auto& attached) { return attached.get() == &observer; });
}

}  // namespace tesserae::shard
