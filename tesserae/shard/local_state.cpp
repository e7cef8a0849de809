#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tesserae/mesh/transfer.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/memory.h"

namespace tesserae::shard {
namespace {

// Where `elements` of the flat buffer lie in what a rank holds, which is the range `owned`.
at::Tensor narrow(const at::Tensor& local, const mesh::Range& elements, const mesh::Range& owned) {
  return local.narrow(0, elements.begin - owned.begin, elements.size());
}

// Messages travel in memory of the group's device; what is on the host (offload) passes through it.
class Staged {
 public:
  explicit Staged(c10::Device device) : device_(device) {}
  at::Tensor out(const at::Tensor& data) const { return data.to(device_); }
  at::Tensor in(const at::Tensor& data) {
    if (data.device() == device_) return data;
    arrivals_.emplace_back(data, at::empty_like(data, data.options().device(device_)));
    return arrivals_.back().second;
  }
  void finish() const {
    for (const auto& [data, arrived] : arrivals_) data.copy_(arrived);
  }

 private:
  c10::Device device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals_;
};

// What this rank sends and receives in one group.
class Messages {
 public:
  explicit Messages(std::vector<int> members) : members_(std::move(members)) {}

  const std::vector<int>& members() const { return members_; }
  bool knows(int rank) const { return index_of(rank) < static_cast<int>(members_.size()); }
  void send(int rank, at::Tensor data) { sends_.push_back({index_of(rank), std::move(data)}); }
  void receive(int rank, at::Tensor data) { receives_.push_back({index_of(rank), std::move(data)}); }

  /// Returns the bytes that were sent.
  uint64_t exchange(comm::Group& group, const comm::Label& label) const {
    const uint64_t before = group.counters().exchange.bytes;
    group.exchange(sends_, receives_, label);
    return group.counters().exchange.bytes - before;
  }

 private:
  int index_of(int rank) const { return static_cast<int>(std::ranges::find(members_, rank) - members_.begin()); }

  std::vector<int> members_;
  std::vector<comm::Message> sends_, receives_;
};

// By rank in the fabric; the groups of a fabric of some ranks name their members by rank in the job.
std::vector<int> all_ranks(const comm::Fabric& fabric) {
  std::vector<int> ranks(static_cast<size_t>(fabric.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

at::Tensor new_tensor(const UnitContext& context, int64_t elements, c10::ScalarType dtype, offload::Tier tier,
                      bool travels = true) {
  ++context.statistics().allocations;
  return context.sharding->allocate(elements, dtype, tier, travels);
}

bool is_compute_piece(const Flat& flat) {
  return flat.master_is_piece() && flat.dtypes().master == flat.dtypes().compute;
}

}  // namespace

offload::Tier master_tier(const offload::Tiers& tiers, const Flat& flat) {
  const offload::Tier tier = is_compute_piece(flat) || !flat.trainable() ? tiers.parameters : tiers.optimizer;
  // What is frozen and used in place may not wait on the host: nothing would bring it.
  const bool in_place = !flat.trainable() && flat.layout().degrees().parameters == 1;
  return in_place && tier == offload::Tier::host ? offload::Tier::device : tier;
}

at::Tensor new_local(const UnitContext& context, const Flat& flat, c10::ScalarType dtype, offload::Tier tier,
                     bool travels) {
  at::Tensor local = new_tensor(context, flat.chunk(), dtype, tier, travels);
  if (offload::is_paged(local)) return local;  // zeros
  const int64_t used = std::clamp(flat.elements() - flat.chunk_range().begin, int64_t{0}, flat.chunk());
  local.narrow(0, used, flat.chunk() - used).zero_();
  return local;
}

at::Tensor new_state(const Engine& engine, const Shard& shard) {
  for (const FlatBuffer* buffer : engine.buffers()) {
    if (buffer->shard() == nullptr || buffer->shard()->index != shard.index) continue;
    const UnitContext& context = buffer->unit().context();
    if (context.sharding->options.tiers.optimizer != offload::Tier::disk) break;
    return new_local(context, buffer->flat(), shard.master.scalar_type(), offload::Tier::disk);
  }
  return at::zeros_like(shard.master, shard.master.options());
}

at::Tensor new_local(const UnitContext& context, const Flat& flat, const at::Tensor& shared) {
  if (!shared.defined() || !is_compute_piece(flat)) {
    return new_local(context, flat, flat.dtypes().master, master_tier(context.sharding->options.tiers, flat));
  }
  ++context.statistics().allocations;
  const mesh::Range range = flat.chunk_range();
  // A storage of its own, as large as the part: what users save of it is just that.
  return at::from_blob(
      shared.narrow(0, range.begin, range.size()).mutable_data_ptr(), {range.size()}, [shared](void*) {},
      shared.options());
}

at::Tensor piece_for(const UnitContext& context, const Flat& flat, const at::Tensor& master) {
  const auto compute = flat.dtypes().compute;
  if (!flat.master_is_piece()) {
    // On an accelerator it stays there whatever the tiers: owners of chunks refresh it over the device's transport.
    const Sharding& sharding = *context.sharding;
    const bool on_disk = sharding.options.tiers.parameters == offload::Tier::disk && sharding.device.is_cpu();
    const at::Tensor piece =
        new_tensor(context, flat.parameter_piece(), compute, on_disk ? offload::Tier::disk : offload::Tier::device);
    return on_disk ? piece : at::Tensor(piece).zero_();
  }
  return flat.dtypes().master == compute && master.device() == context.sharding->device ? master : at::Tensor();
}

uint64_t move_local(comm::Fabric& fabric, const Flat& from, const Flat& to, const std::vector<at::Tensor>& before,
                    const std::vector<at::Tensor>& after) {
  const auto elsewhere = [&](const at::Tensor& tensor) {
    return tensor.device() != fabric.device() || offload::is_paged(tensor);
  };
  const bool staged_or_paged = std::ranges::any_of(before, elsewhere) || std::ranges::any_of(after, elsewhere);
  if (before.size() > 1 && staged_or_paged) {  // one at a time
    uint64_t bytes = 0;
    for (size_t i = 0; i < before.size(); ++i) bytes += move_local(fabric, from, to, {before[i]}, {after[i]});
    return bytes;
  }
  const int rank = from.rank();
  const auto plan = [&](const auto& planner) {
    return planner(from.layout(), to.layout(), from.elements(), from.alignment(), rank);
  };
  const auto gets = plan(mesh::plan_transfer), gives = plan(mesh::plan_sends);
  const mesh::Range had = from.chunk_range(), has = to.chunk_range();
  Staged staged(fabric.device());
  const offload::Use reads(before, offload::Access::read), fills(after, offload::Access::fill);
  Messages near(fabric.world().host_ranks(rank)), far(all_ranks(fabric));
  const auto messages = [&](int peer) -> Messages& { return near.knows(peer) ? near : far; };
  // Between two ranks there is at most one range of each tensor, so both sides have them in the same order.
  for (size_t i = 0; i < before.size(); ++i) {
    const at::Tensor source = gives.empty() ? before[i] : staged.out(before[i]);
    for (const mesh::Move& move : gives) messages(move.peer).send(move.peer, narrow(source, move.source, had));
    for (const mesh::Move& move : gets) {
      const at::Tensor destination = narrow(after[i], move.destination, has);
      if (move.peer == rank) {
        destination.copy_(narrow(before[i], move.source, had));
      } else {
        messages(move.peer).receive(move.peer, staged.in(destination));
      }
    }
  }
  const comm::Label label{from.unit()};
  const uint64_t bytes = near.exchange(fabric.group(near.members(), comm::Traffic::control), label) +
                         far.exchange(fabric.everyone(), label);
  staged.finish();
  return bytes;
}

}  // namespace tesserae::shard
