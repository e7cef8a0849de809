// Turning the dial.
//
//  1. All ranks ask for the same setting, hold the same kinds of state, and the setting is possible.
//  2. Nothing is in flight: a step that was cut short is forgotten, accumulated gradients go to their owners.
//  3. The groups of the new degrees are made, or found; the engine borrows them.
//  4. Each host, device and disk has room for the largest moment of steps 6 and 7; that on a disk is taken.
//  5. The old pool goes; what still shows a buffer of it does with its flat buffer in step 6.
//  6. Flat buffer by flat buffer: new local values are filled from the old ones, which are then freed; parameters,
//     gradients, the user's tensors and companions take the new ones.
//  7. The pool is reserved anew, masters become what the next forward sees, and what was freed goes back to the system.
//  8. Groups that no degrees in use need any more end.
//
// Up to 4 a failure is one of all ranks and moves nothing. After 4 it leaves the model between two layouts, which
// Engine::Phase::torn remembers. Steps 1 and 4 are in reshard_checks.cpp.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/reshard.h"

namespace tesserae::shard {
namespace {

std::string failure_of(const std::function<void()>& act) {
  try {
    act();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

at::Tensor gradient_or_zeros(const FlatBuffer& buffer) {
  if (buffer.shard()->grad.defined()) return buffer.shard()->grad;
  offload::zero(buffer.gradient()->memory());
  return buffer.gradient()->memory();
}

}  // namespace

Reshard::Reshard(Engine& engine, const Setting& setting, std::shared_ptr<offload::Disk> disk)
    : engine_(engine), setting_(setting), disk_(std::move(disk)), prepared_(engine.prepared()) {}

Resharding Reshard::run() {
  const auto begin = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  const autograd::OrdinaryTensors ordinary;
  Resharding result{engine_.setting(), setting_};
  // 1.
  require_agreement();
  const auto is_there = [this](const auto& unit) {
    const Sharding& sharding = unit->sharding();
    return sharding.layout.degrees() == sharding.degrees_here(setting_.degrees) &&
           sharding.options.tiers == setting_.tiers;
  };
  if (std::ranges::all_of(engine_.units(), is_there)) return result;
  // 2.
  engine_.settle();
  has_gradient_ = gradients_of_all();
  // 3.
  next_ = next_shardings();
  // 4.
  require_memory();
  // 5.
  const Engine::Phase phase = engine_.phase();
  engine_.enter(Engine::Phase::torn);
  Workspace& workspace = *engine_.workspace_;
  workspace.statistics.pool_misses += workspace.pool.misses();
  workspace.pool = Pool(next_.front()->device, workspace.pool.elastic());
  // 6.
  size_t index = 0;
  for (size_t i = 0; i < next_.size(); ++i) {
    ShardedUnit& unit = *engine_.units()[i];
    unit.set_sharding(next_[i]);
    for (const auto& buffer : unit.buffers()) result.bytes += recut(*buffer, has_gradient_[index++]);
  }
  // 7.
  require_all(failure_of([this] {
                if (prepared_) engine_.reserve_pool();
              }),
              "the buffer pool");
  for (const auto& unit : engine_.units()) unit->publish();
  os::give_back_freed_memory();
  engine_.enter(phase);
  // 8. Nothing has run on them since step 2.
  engine_.root().sharding().fabric->release_unused();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

// 2.

// By flat buffer: whether a rank has a gradient. Those that hold no element of it, or unused ones, may have none.
std::vector<bool> Reshard::gradients_of_all() const {
  std::vector<bool> found;
  for (const FlatBuffer* buffer : engine_.buffers()) {
    const bool mine = buffer->shard() != nullptr && buffer->shard()->grad.defined();
    const auto all = comm::from_all_ranks(*buffer->unit().sharding().fabric, mine ? 1 : 0);
    found.push_back(std::ranges::max(all) > 0);
  }
  return found;
}

// 3.

std::vector<std::shared_ptr<const Sharding>> Reshard::next_shardings() const {
  std::map<const Sharding*, std::shared_ptr<const Sharding>> made;
  std::vector<std::shared_ptr<const Sharding>> shardings;
  for (const auto& unit : engine_.units()) {
    const Sharding& last = unit->sharding();
    auto& next = made[&last];
    if (!next) {
      next = last.with(setting_, disk_);
      // Makes the group of this host now: connecting is not part of moving.
      last.fabric->group(last.fabric->world().host_ranks(last.fabric->rank()), comm::Traffic::control);
    }
    shardings.push_back(next);
  }
  return shardings;
}

// 6.

uint64_t Reshard::recut(FlatBuffer& buffer, bool has_gradient) {
  const UnitContext& context = buffer.unit().context();
  const Flat& from = buffer.flat();
  Shard* const shard = buffer.shard();
  FlatBuffer::State state;
  state.flat = std::make_unique<Flat>(from.with(context.sharding->layout));
  if (prepared_) state.shared = buffer.parameter().shared_memory(*state.flat);
  std::vector<at::Tensor> before, after;
  std::vector<size_t> kept;  // by companion: one past its last tensor in `before`
  const auto prepare = [&] {
    before.push_back(buffer.parameter().local());
    if (has_gradient) before.push_back(gradient_or_zeros(buffer));
    for (Companion* companion : engine_.companions_) {
      if (shard == nullptr) break;
      std::ranges::move(companion->take(*shard), std::back_inserter(before));
      kept.push_back(before.size());
    }
    after.push_back(new_local(context, *state.flat, state.shared));
    const offload::Tiers& tiers = context.sharding->options.tiers;
    while (after.size() < before.size()) {
      const bool is_gradient = has_gradient && after.size() == 1;
      after.push_back(new_local(context, *state.flat, before[after.size()].scalar_type(),
                                is_gradient ? tiers.gradients : tiers.optimizer, /*travels=*/is_gradient));
    }
    state.piece = piece_for(context, *state.flat, after[0]);
  };
  require_all(failure_of(prepare), cat("its part of unit \"", from.unit(), "\""));
  const uint64_t bytes = move_local(*context.sharding->fabric, from, *state.flat, before, after);

  buffer.unit().tell([&](StepObserver& observer) { observer.before_recut(buffer); });
  before.clear();
  state.master = after[0];
  if (has_gradient) state.grad = after[1];
  buffer.replace(std::move(state));
  if (prepared_ && setting_.tiers.gradients == offload::Tier::disk) {
    require_all(failure_of([&] { buffer.take_room(); }),
                cat("room for gradients of unit \"", buffer.unit().name(), "\""));
  }
  buffer.unit().tell([&](StepObserver& observer) { observer.after_recut(buffer); });
  for (size_t i = 0, begin = has_gradient ? 2 : 1; i < kept.size(); begin = kept[i++]) {
    engine_.companions_[i]->put(
        *shard, {after.begin() + static_cast<int64_t>(begin), after.begin() + static_cast<int64_t>(kept[i])});
  }
  return bytes;
}

// What failed on one rank stops all. Each that failed names its own cause.
void Reshard::require_all(const std::string& failure, const std::string& what) const {
  const comm::Fabric& fabric = *engine_.root().sharding().fabric;
  const auto failed = comm::from_all_ranks(*engine_.root().sharding().fabric, failure.empty() ? 0 : 1);
  const auto first = std::ranges::max_element(failed);
  if (*first == 0) return;
  const auto rank = failure.empty() ? first - failed.begin() : fabric.rank();
  throw comm::CommError(
      name, cat("rank ", rank, " could not make ", what, failure.empty() ? "; its own error says why" : ": ", failure,
                ". The training state is between two layouts: start the job again from its last checkpoint"));
}

}  // namespace tesserae::shard
