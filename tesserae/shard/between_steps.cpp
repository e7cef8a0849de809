// What an engine does between steps: phases, publishing new values, gradients as others see them, counts.

#include <ATen/core/grad_mode.h>

#include <array>
#include <exception>
#include <stdexcept>
#include <utility>

#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/reshard.h"

namespace tesserae::shard {
namespace {

bool may_follow(Engine::Phase from, Engine::Phase to) {
  using enum Engine::Phase;
  switch (to) {
    case setup:
      return from == backward || from == torn;
    case idle:
      return true;
    case forward:
      return from == idle || from == backward;
    case backward:
      return from != torn && from != backward;
    case torn:
      return from == setup || from == idle;
    case rejoining:
      return from != torn;
  }
  return false;
}

}  // namespace

void Engine::enter(Phase next) {
  static constexpr std::array names{"setup", "idle", "forward", "backward", "torn", "rejoining"};
  if (!may_follow(phase_, next)) {
    throw std::logic_error(cat("[Engine] phase ", names[static_cast<size_t>(next)], " cannot follow phase ",
                               names[static_cast<size_t>(phase_)]));
  }
  phase_ = next;
}

void Engine::require_not_torn() const {
  if (phase_ != Phase::torn) return;
  throw comm::CommError("reshard",
                        cat("an earlier change of degrees failed half-way on rank ", root().sharding().fabric->rank(),
                            ": its training state is lost. Start the job again from its last checkpoint"));
}

void Engine::gather_early(ShardedUnit& unit) {
  const autograd::OrdinaryTensors ordinary;
  require_not_torn();
  if (!prepared()) prepare();
  if (unit.gathered_early() || phase_ == Phase::backward) {
    unit.start_gather();
    return;
  }
  const at::NoGradGuard no_grad;
  unit.tell([&](StepObserver& observer) { observer.take_values(unit); });
  unit.publish();
  unit.start_gather();
  unit.set_gathered_early(true);
}

void Engine::release(ShardedUnit& unit) {
  unit.set_gathered_early(false);
  if (!unit.holds_buffers()) return;
  free(unit);
  workspace_->pool.give_back();
  if (phase_ == Phase::idle) finish_reading();
}

void Engine::publish(int shard) {
  require_not_torn();
  for (const FlatBuffer* buffer : buffers_) {
    if (buffer->shard() != nullptr && buffer->shard()->index == shard) buffer->unit().publish({&buffer->parameter()});
  }
}

void Engine::update_later(int shard, std::function<void()> update) {
  require_not_torn();
  for (FlatBuffer* buffer : buffers_) {
    if (buffer->shard() == nullptr || buffer->shard()->index != shard) continue;
    buffer->unit().update_later(*buffer, std::move(update));
  }
}

void Engine::complete_updates() {
  std::exception_ptr failure;  // of the first; the others are completed all the same
  for (const auto& unit : units_) {
    try {
      unit->complete_updates();
    } catch (...) {
      if (failure == nullptr) failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Engine::zero_grad() {
  for (const auto& unit : units_) unit->zero_grad();
}

void Engine::discard_accumulated() {
  for (const FlatBuffer* buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->discard();
  }
  for (const auto& unit : units_) unit->set_accumulating(false);
}

void Engine::take_gradients() {
  for (const auto& unit : units_) {
    unit->tell([&](StepObserver& observer) { observer.take_gradients(*unit); });
  }
}

void Engine::show_gradients() {
  for (const auto& unit : units_) {
    unit->tell([&](StepObserver& observer) { observer.show_gradients(*unit); });
  }
}

std::shared_ptr<void> Engine::add_companion(Companion& companion) {
  companions_.push_back(&companion);
  return {&companion, [alive = std::weak_ptr<Engine*>(alive_)](void* gone) {
            if (const auto engine = alive.lock()) std::erase((*engine)->companions_, static_cast<Companion*>(gone));
          }};
}

Resharding Engine::reshard(const mesh::Degrees& degrees) {
  return turn({degrees, root().sharding().options.tiers});
}

Resharding Engine::turn(const Setting& setting, std::shared_ptr<offload::Disk> disk) {
  return Reshard(*this, setting, std::move(disk)).run();
}

// Nothing is in flight afterwards: a step that was cut short is forgotten, what was accumulated is with its owners.
void Engine::settle() {
  if (phase_ == Phase::backward) abandon_step();
  for (const auto& unit : units_) unit->reset();
  if (phase_ == Phase::forward) enter(Phase::idle);
  complete_updates();
  take_gradients();
  for (const auto& unit : units_) {
    unit->tell([&](StepObserver& observer) { observer.take_values(*unit); });
  }
  for (const auto& unit : units_) {
    if (!unit->has_gradients(/*boundary=*/true)) continue;
    wait_for_reductions(root().sharding().options.limit_reductions - 1);
    reduce(*unit, /*boundary=*/true);
  }
  wait_for_reductions(0);
  for (const auto& unit : units_) unit->set_accumulating(false);
  free_all();
  drain();
  show_gradients();
}

void Engine::drain() {
  for (const auto& unit : units_) {
    unit->sharding().gather_lane.drain();
    unit->sharding().reduce_lane.drain();
  }
}

Statistics Engine::statistics() const {
  Statistics now = workspace_->statistics;
  now.exposed_gather = workspace_->exposed_gather.seconds();
  now.exposed_reduce = workspace_->exposed_reduce.seconds();
  now.pool_reserved_bytes = workspace_->pool.reserved_bytes();
  now.pool_misses += workspace_->pool.misses();
  now.allocations += now.pool_misses;
  for (const FlatBuffer* buffer : buffers_) {
    const at::Tensor& master = buffer->parameter().local();
    now.state_bytes += buffer->parameter().state_bytes() + master.numel() * master.element_size();
    if (buffer->gradient() != nullptr) now.state_bytes += buffer->gradient()->state_bytes();
  }
  return now;
}

}  // namespace tesserae::shard
