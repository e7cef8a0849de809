// How an engine survives the loss of a rank. A rank that is left:
//
//  1. forgets the step that was broken: phases, reductions, the order of units, which a new rank does not know. Nothing
//     is in flight any more: the fabric has ended the lanes of before;
//  2. makes its groups, in the order in which a new rank makes them when it builds its engine;
//  3. flat buffer by flat buffer, drops gradients and what was gathered, and makes shared copies anew, into which its
//     masters move; these are never without a place;
//  4. reserves the pool.
//
// Then all ranks, the new ones too:
//  5. flat buffer by flat buffer, the first replica that has a chunk sends it to those that have not: the master, and
//     what companions keep of it;
//  6. masters become what the next forward sees.

#include "tesserae/shard/rejoin.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/replicas.h"

namespace tesserae::shard {
namespace {

/// Of the ranks that hold the same chunk, the member that gives it to others; -1: none has it.
int giver_of(const comm::Group& replicas, const std::vector<bool>& whole) {
  const auto& members = replicas.members();
  const auto found = std::ranges::find_if(members, [&](int rank) { return whole[static_cast<size_t>(rank)]; });
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

}  // namespace

void Rejoin::connect() {
  const at::NoGradGuard no_grad;
  // 1.
  forget_step();
  engine_.enter(Engine::Phase::rejoining);
  // 2.
  std::map<const Sharding*, std::shared_ptr<const Sharding>> made;
  std::vector<std::shared_ptr<const Sharding>> next;
  for (const auto& unit : engine_.units()) {
    auto& sharding = made[&unit->sharding()];
    if (!sharding) sharding = unit->sharding().again();
    next.push_back(sharding);
  }
  Workspace& workspace = *engine_.workspace_;
  workspace.statistics.pool_misses += workspace.pool.misses();
  workspace.pool = Pool(next.front()->device, workspace.pool.elastic());
  // 3.
  for (size_t i = 0; i < next.size(); ++i) engine_.units()[i]->set_sharding(next[i]);
  for (FlatBuffer* buffer : engine_.buffers_) reconnect(*buffer);
  // 4.
  engine_.reserve_pool();
  engine_.enter(Engine::Phase::idle);
}

// 1.

void Rejoin::forget_step() {
  // The lane on which updates were to run may have ended before; and new ranks have none to publish.
  for (const auto& unit : engine_.units()) unit->forget_updates();
  engine_.reductions_.clear();
  engine_.schedule_ = Schedule();
  for (const auto& unit : engine_.units()) {
    unit->set_accumulating(false);
    unit->cut_short();
  }
  if (engine_.phase() == Engine::Phase::backward) engine_.close_backward();
}

// 3.

void Rejoin::reconnect(FlatBuffer& buffer) {
  const UnitContext& context = buffer.unit().context();
  FlatBuffer::State state;
  state.flat = std::make_unique<Flat>(buffer.flat().with(context.sharding->layout));
  state.shared = buffer.parameter().shared_memory(*state.flat);
  state.master = buffer.parameter().local();
  state.piece = piece_for(context, *state.flat, state.master);
  buffer.unit().tell([&](StepObserver& observer) { observer.before_recut(buffer); });
  buffer.replace(std::move(state));
  buffer.unit().tell([&](StepObserver& observer) { observer.after_recut(buffer); });
}

// 5.

bool Rejoin::can_fill(const std::vector<bool>& whole, bool keeps_own) {
  const bool lacks = std::ranges::any_of(engine_.units(), [&](const auto& unit) {
    const comm::Group& replicas = unit->sharding().replica_group;
    return giver_of(replicas, whole) < 0 && !(keeps_own && replicas.size() == 1);
  });
  return comm::lowest_rank_with(*engine_.root().sharding().mesh->job(), lacks) < 0;
}

uint64_t Rejoin::fill(const std::vector<bool>& whole) {
  const at::NoGradGuard no_grad;
  uint64_t bytes = 0;
  for (FlatBuffer* buffer : engine_.buffers_) {
    const Sharding& sharding = buffer->unit().sharding();
    comm::Group& replicas = sharding.replica_group;
    const int giver = giver_of(replicas, whole);
    if (giver < 0) continue;  // keeps_own
    const auto is_new = [&](int member) {
      return !whole[static_cast<size_t>(replicas.members()[static_cast<size_t>(member)])];
    };
    const std::vector<at::Tensor> values = replicated_values(*buffer, engine_.companions());
    const bool gets = is_new(replicas.rank());
    const offload::Use use(values, gets ? offload::Access::fill : offload::Access::read);
    std::vector<comm::Message> sends, receives;
    for (const at::Tensor& value : values) {
      for (int member = 0; giver == replicas.rank() && member < replicas.size(); ++member) {
        if (is_new(member)) sends.push_back({.peer = member, .data = value.to(sharding.device)});
      }
      if (gets) {
        const bool there = value.device() == sharding.device;
        const auto options = value.options().device(sharding.device);
        receives.push_back({.peer = giver, .data = there ? value : at::empty_like(value, options)});
      }
    }
    if (sends.empty() && receives.empty()) continue;
    const comm::Label label{buffer->flat().unit()};
    sharding.reduce_lane.submit([&] { replicas.exchange(sends, receives, label); }).wait();
    for (const comm::Message& sent : sends) bytes += sent.data.nbytes();
    for (size_t i = 0; i < receives.size(); ++i) {
      if (!receives[i].data.is_same(values[i])) at::Tensor(values[i]).copy_(receives[i].data);
    }
  }
  // 6.
  for (const auto& unit : engine_.units()) {
    unit->publish();
    unit->tell([&](StepObserver& observer) { observer.after_rejoin(*unit); });
  }
  os::give_back_freed_memory();
  return bytes;
}

}  // namespace tesserae::shard
