// Steps 1 and 4 of reshard.cpp: what must hold before anything moves.

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/offload/paged_memory.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/memory.h"
#include "tesserae/shard/pool_plan.h"
#include "tesserae/shard/reshard.h"

namespace tesserae::shard {
namespace {

// What ranks tell each other in the course of a turn lies on the device, too.
constexpr double words_of_a_turn = 64 << 10;

// Allocators of devices give multiples of so many.
double rounded(int64_t bytes) {
  constexpr int64_t grain = 512;
  return static_cast<double>((bytes + grain - 1) / grain * grain);
}

/// Bytes that could be allocated; on a device, `wanted` or nothing: it is asked for that much. Its allocator knows what
/// it keeps for the next who ask, and what others have left of the device. What was asked for is held until this ends:
/// while all ranks hold theirs, those that share a device are added up by the device itself.
class Available {
 public:
  Available(c10::Device device, double wanted) {
    if (device.is_cpu()) {
      bytes_ = static_cast<double>(os::host_memory().available);
      return;
    }
    const c10::DeviceGuard guard(device);
    c10::Allocator& allocator = *c10::GetAllocator(device.type());
    try {
      held_ = allocator.allocate(static_cast<size_t>(std::max(wanted - words_of_a_turn, 0.0)));
      allocator.allocate(static_cast<size_t>(words_of_a_turn));  // given back: what the ranks say next lies there
      bytes_ = wanted;
    } catch (const c10::OutOfMemoryError&) {
      held_ = {};
    }
  }
  double bytes() const { return bytes_; }

 private:
  c10::DataPtr held_;
  double bytes_ = 0;
};

double sum_of(const std::vector<double>& values, const std::vector<int>& ranks) {
  double sum = 0;
  for (const int rank : ranks) sum += values[static_cast<size_t>(rank)];
  return sum;
}

std::string megabytes(double bytes) {
  return cat(static_cast<int64_t>(bytes / 1e6), " MB");
}

}  // namespace

// 1.

void Reshard::require_agreement() const {
  engine_.require_not_torn();
  if (autograd::in_backward()) throw InvalidArgument(name, "called inside a backward; call it between steps");
  std::string held = cat("asked for: ", to_string(setting_), "\n");
  for (const auto& shard : engine_.shards()) {
    for (Companion* companion : engine_.companions_) {
      held += cat("state of shard ", shard.index, ":");
      for (const auto dtype : companion->dtypes(shard)) held += cat(" ", c10::toString(dtype));
      held += "\n";
    }
  }
  const Sharding& root = engine_.root().sharding();
  comm::Fabric& fabric = *root.fabric;
  shard::require_agreement(fabric, held);
  // Units may have process groups of their own, of another size on another rank.
  std::exception_ptr impossible;
  try {
    require_possible();
  } catch (const InvalidArgument&) {
    impossible = std::current_exception();
  }
  const auto failed = comm::from_all_ranks(fabric, impossible ? 1 : 0);
  const auto first = std::ranges::max_element(failed);
  // What one tensor-parallel rank cannot do, none does.
  const double any = over_tensor_ranks(*root.mesh, *first, comm::Reduction::maximum);
  if (impossible) std::rethrow_exception(impossible);
  if (any > *first) {
    throw InvalidArgument(name,
                          cat(to_string(setting_), " cannot be on another tensor-parallel rank, whose error says ",
                              "why. Nothing was changed"));
  }
  if (*first > 0) {
    throw InvalidArgument(name, cat(to_string(setting_), " cannot be on rank ", first - failed.begin(),
                                    ", whose error says why. Nothing was changed"));
  }
}

void Reshard::require_possible() const {
  for (const auto& unit : engine_.units()) {
    const Sharding& sharding = unit->sharding();
    sharding.require_possible(setting_.tiers, disk_);
    const mesh::Layout layout(sharding.fabric->size(), sharding.degrees_here(setting_.degrees));
    if (unit->context().reducer != nullptr && !allows_reducer(layout)) {
      throw InvalidArgument(
          name, cat("unit \"", unit->name(), "\" has a hook in place of its reduction, which cannot do what ",
                    to_string(setting_.degrees), " needs; all three degrees must be 1 or ", layout.ranks()));
    }
  }
}

// 4.

// The most of the moments that follow each other: while a flat buffer moves, when the pool is there again, and in the
// next backward, when there are gradients.
void Reshard::require_memory() const {
  struct Place {
    double used = 0, peak = 0, gradients = 0;

    void gets(double bytes) { peak = std::max(peak, used += bytes); }
    void for_a_moment(double bytes) { peak = std::max(peak, used + bytes); }
    double most() const { return std::max(peak, used + gradients); }
  } host, device, disk;
  const c10::Device compute = engine_.root().sharding().device;
  Place& of_pool = compute.is_cpu() ? host : device;
  of_pool.used -= static_cast<double>(engine_.workspace_->pool.held_bytes());
  double paged = 0;  // what lies on a disk is in memory while it moves, one tensor after the other
  for (size_t i = 0; i < engine_.buffers().size(); ++i) {
    const FlatBuffer& buffer = *engine_.buffers()[i];
    const Sharding &before = buffer.unit().sharding(), &after = *next_[static_cast<size_t>(buffer.unit().index())];
    const Flat next = buffer.flat().with(after.layout);
    const auto memory_of = [&](const Sharding& sharding) -> Place& {
      return sharding.state_device.is_cpu() ? host : device;
    };
    const bool holds_gradient = buffer.gradient() != nullptr && buffer.gradient()->has_memory();
    const Bytes comes = bytes_of(buffer, next, after, has_gradient_[i]);
    const Bytes goes = bytes_of(buffer, buffer.flat(), before, has_gradient_[i] || holds_gradient);
    const Bytes later = bytes_of(buffer, next, after, /*has_gradient=*/true);
    if (!holds_gradient) {  // another rank may have one: this one brings zeros
      memory_of(before).gets(goes.memory - bytes_of(buffer, buffer.flat(), before, false).memory);
    }
    memory_of(after).gets(comes.memory);
    device.gets(comes.pieces);
    if (!compute.is_cpu() && (before.state_device.is_cpu() || after.state_device.is_cpu())) {
      const auto element = static_cast<int64_t>(c10::elementSize(next.dtypes().master));
      device.for_a_moment(rounded(buffer.flat().chunk() * element) + rounded(next.chunk() * element));
    }
    memory_of(before).used -= goes.memory;
    memory_of(after).gradients += later.memory - comes.memory;
    device.used -= goes.pieces;
    disk.gets(later.disk);  // whose room is taken at once
    disk.used -= goes.disk;
    paged = std::max(paged, comes.largest_paged + goes.largest_paged);
  }
  of_pool.gets(pool_bytes());
  require_room(c10::kCPU, host.most() + paged);
  if (!compute.is_cpu()) require_room(compute, device.most() + words_of_a_turn);
  if (setting_.tiers.uses(offload::Tier::disk)) require_disk(disk.most());
}

UnitContext Reshard::next_context(const ShardedUnit& unit) const {
  UnitContext context = unit.context();
  context.sharding = next_[static_cast<size_t>(unit.index())];
  return context;
}

// Of the pool that step 7 reserves; an elastic one takes as much in the next step.
double Reshard::pool_bytes() const {
  std::vector<UnitNeeds> needs;
  for (size_t i = 0; i < next_.size(); ++i) {
    const ShardedUnit& unit = *engine_.units()[i];
    const UnitContext context = next_context(unit);
    auto& of_unit = needs.emplace_back(UnitNeeds{unit.name(), !unit.would_free_after_forward(*next_[i]), {}});
    for (const auto& buffer : unit.buffers()) {
      const Flat flat = buffer->flat().with(next_[i]->layout);
      const auto element = static_cast<int64_t>(c10::elementSize(flat.dtypes().reduce));
      of_unit.buffers.push_back({.gathered = buffer->parameter().planned_bytes(context, flat),
                                 .reduced = buffer->gradient() == nullptr ? 0 : flat.total() * element});
    }
  }
  const Options& options = next_.front()->options;
  double bytes = 0;
  for (const PoolPart& part : plan_pool(needs, options.limit_all_gathers, options.limit_reductions)) {
    bytes += rounded(part.bytes) * part.count;
  }
  return bytes;
}

void Reshard::require_room(c10::Device place, double mine) const {
  const Sharding& root = engine_.root().sharding();
  comm::Fabric& fabric = *root.fabric;
  const auto everyones = comm::from_all_ranks(fabric, mine);
  double needed = place.is_cpu() ? sum_of(everyones, fabric.world().host_ranks(fabric.rank())) : mine;
  // Tensor-parallel ranks are neighbours, and each needs as much at the same time.
  if (place.is_cpu()) needed *= root.mesh->degree(mesh::axes::tensor);
  const Available available(place, std::max(needed, 0.0));
  const double free = available.bytes();
  const auto shortages = comm::from_all_ranks(fabric, needed - free);  // by then all have asked
  const auto worst = std::ranges::max_element(shortages);
  const double most = over_tensor_ranks(*root.mesh, *worst, comm::Reduction::maximum);
  if (most <= 0) return;
  if (most > *worst) {
    throw OutOfMemory(name, cat("to go to ", to_string(setting_), ", a rank of another tensor-parallel index lacks ",
                                megabytes(most), ". Nothing was changed; choose higher degrees"));
  }
  throw OutOfMemory(name, cat("to go from ", to_string(engine_.setting()), " to ", to_string(setting_), ", ",
                              place.is_cpu() ? "the host" : "the device", " of rank ", worst - shortages.begin(),
                              " lacks ", megabytes(*worst), " (here ", megabytes(needed), " are needed and ",
                              megabytes(free), " are free). Nothing was changed; choose higher degrees"));
}

void Reshard::require_disk(double bytes) const {
  const Sharding& root = engine_.root().sharding();
  std::string failure;
  try {
    next_.front()->options.disk->reserve(static_cast<uint64_t>(std::max(bytes, 0.0)));
  } catch (const IoError& error) {
    failure = error.what();
  }
  const auto failed = comm::from_all_ranks(*root.fabric, failure.empty() ? 0 : 1);
  const auto first = std::ranges::max_element(failed);
  if (over_tensor_ranks(*root.mesh, *first, comm::Reduction::maximum) == 0) return;
  std::string where = "a disk of another tensor-parallel rank has no room";
  if (*first > 0) {
    const auto rank = static_cast<int>(first - failed.begin());
    where = cat("rank ", rank, ": ", comm::text_of(*root.fabric, failure, rank));
  }
  throw OutOfMemory(name, cat("to go to ", to_string(setting_), ": ", where, ". Nothing was changed"));
}

// Of a flat buffer, wherever it lies. What lies on a disk takes no more memory than the disk is allowed.
Reshard::Bytes Reshard::bytes_of(const FlatBuffer& buffer, const Flat& flat, const Sharding& sharding,
                                 bool has_gradient) const {
  const auto& dtypes = flat.dtypes();
  const offload::Tiers& tiers = sharding.options.tiers;
  Bytes bytes;
  const auto add = [&](int64_t elements, c10::ScalarType dtype, offload::Tier tier, bool travels) {
    const size_t size = static_cast<size_t>(elements) * c10::elementSize(dtype);
    if (tier == offload::Tier::disk) {
      bytes.disk += static_cast<double>(offload::PagedMemory::on_disk(size));
      bytes.largest_paged = std::max(bytes.largest_paged, static_cast<double>(size));
    } else {
      const bool pinned = travels && tier == offload::Tier::host && !sharding.device.is_cpu();
      const auto asked = static_cast<int64_t>(size);
      bytes.memory += rounded(pinned ? pinned_bytes(asked) : asked);
    }
  };
  // Where ranks share the gathered copy, each counts the piece that it fills.
  const bool is_now = &sharding == &buffer.unit().sharding();
  const auto shares = [&] {
    return is_now ? buffer.parameter().shared() : buffer.parameter().would_share(next_context(buffer.unit()), flat);
  };
  if (!flat.master_is_piece() && !sharding.device.is_cpu() && tiers.parameters != offload::Tier::device) {
    bytes.pieces += rounded(flat.parameter_piece() * static_cast<int64_t>(c10::elementSize(dtypes.compute)));
  } else if (!flat.master_is_piece() || (dtypes.master != dtypes.compute && shares())) {
    add(flat.parameter_piece(), dtypes.compute, tiers.parameters, /*travels=*/true);
  }
  add(flat.chunk(), dtypes.master, master_tier(tiers, flat), /*travels=*/true);
  if (has_gradient && flat.trainable()) add(flat.chunk(), dtypes.master, tiers.gradients, /*travels=*/true);
  if (buffer.shard() == nullptr) return bytes;
  for (Companion* companion : engine_.companions_) {
    for (const auto dtype : companion->dtypes(*buffer.shard()))
      add(flat.chunk(), dtype, tiers.optimizer, /*travels=*/false);
  }
  return bytes;
}

}  // namespace tesserae::shard
