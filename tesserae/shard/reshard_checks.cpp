// Steps 1 and 4 of reshard.cpp: what must hold before anything moves.

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"

namespace tesserae::shard {
namespace {

constexpr const char* name = "reshard";

// Bytes that could be allocated; on a device, `wanted` or nothing: it is asked for that much.
double available(c10::Device device, double wanted) {
  if (device.is_cpu()) return static_cast<double>(os::host_memory().available);
  const c10::DeviceGuard guard(device);
  try {
    c10::GetAllocator(device.type())->allocate(static_cast<size_t>(wanted));
    return wanted;
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
}

double sum_of(const std::vector<double>& values, const std::vector<int>& ranks) {
  double sum = 0;
  for (const int rank : ranks) sum += values[static_cast<size_t>(rank)];
  return sum;
}

std::string megabytes(double bytes) {
  return cat(static_cast<int64_t>(bytes / 1e6), " MB");
}

}  // namespace

void Engine::throw_torn() const {
  throw comm::CommError(name, cat("an earlier change of degrees failed half-way on rank ", context().fabric->rank(),
                                  ": its training state is lost. Start the job again from its last checkpoint"));
}

// 1.

void Engine::require_resharding(const mesh::Degrees& degrees) const {
  require_whole();
  if (autograd::in_backward()) throw InvalidArgument(name, "called inside a backward; call it between steps");
  std::string held = cat("degrees asked for: ", to_string(degrees), "\n");
  for (const auto& shard : shards_) {
    for (Companion* companion : companions_) {
      held += cat("state of shard ", shard.index, ":");
      for (const auto dtype : companion->dtypes(shard)) held += cat(" ", c10::toString(dtype));
      held += "\n";
    }
  }
  comm::Fabric& fabric = *context().fabric;
  require_agreement(fabric, held);
  // Units may have process groups of their own, of another size on another rank.
  std::exception_ptr impossible;
  try {
    require_possible(degrees);
  } catch (const InvalidArgument&) {
    impossible = std::current_exception();
  }
  const auto failed = from_all_ranks(fabric, impossible ? 1 : 0);
  const auto first = std::ranges::max_element(failed);
  // What one tensor-parallel rank can not do, none does.
  const double any =
      over_tensor_ranks(context().options.tensor_group, *first, comm::Reduction::maximum, fabric.device());
  if (impossible) std::rethrow_exception(impossible);
  if (any > *first) {
    throw InvalidArgument(name,
                          cat(to_string(degrees), " can not be on another tensor-parallel rank, whose error says ",
                              "why. Nothing was changed"));
  }
  if (*first > 0) {
    throw InvalidArgument(name, cat(to_string(degrees), " can not be on rank ", first - failed.begin(),
                                    ", whose error says why. Nothing was changed"));
  }
}

void Engine::require_possible(const mesh::Degrees& degrees) const {
  for (const auto& unit : units_) {
    const mesh::Layout layout(unit.context->fabric->size(), degrees);
    const bool one_reduction = degrees.parameters == degrees.gradients && degrees.gradients == degrees.optimizer &&
                               (degrees.optimizer == 1 || degrees.optimizer == layout.ranks());
    if (unit.context->reduce_hook && !one_reduction) {
      throw InvalidArgument(name,
                            cat("unit \"", unit.name, "\" has a hook in place of its reduction, which can not do what ",
                                to_string(degrees), " needs; all three degrees must be 1 or ", layout.ranks()));
    }
  }
}

// 4.

// The most of two moments: while the last flat buffer of a place moves, and in the next backward, when there are
// gradients.
void Engine::require_memory(const std::vector<bool>& gradients) {
  struct Place {
    double used = 0, peak = 0, gradients = 0;
  } host, device;
  for (size_t i = 0; i < flats_.size(); ++i) {
    const FlatState& state = flats_[i];
    const Context& next_context = *next_contexts_[static_cast<size_t>(state.unit)];
    const Flat& now = *state.flat;
    const Flat next(now.unit(), now.slots(), now.dtypes(), now.trainable(), next_context.layout, now.rank());
    const auto bytes = [&](const Flat& flat, bool with) { return static_cast<double>(bytes_of(state, flat, with)); };
    Place& place = next_context.options.offload || next_context.device.is_cpu() ? host : device;
    place.peak = std::max(place.peak, place.used + bytes(next, gradients[i]));
    place.used += bytes(next, gradients[i]) - bytes(now, gradients[i]);
    place.gradients += bytes(next, true) - bytes(next, gradients[i]);
  }
  const auto most = [](const Place& place) { return std::max(place.peak, place.used + place.gradients); };
  require_place(c10::kCPU, most(host));
  if (!context().device.is_cpu()) require_place(context().device, most(device));
}

void Engine::require_place(c10::Device place, double mine) const {
  comm::Fabric& fabric = *context().fabric;
  const auto everyones = from_all_ranks(fabric, mine);
  double needed = place.is_cpu() ? sum_of(everyones, fabric.world().host_ranks(fabric.rank())) : mine;
  // Tensor-parallel ranks are neighbours, and each needs as much at the same time.
  const comm::Group* const parallel = context().options.tensor_group;
  if (place.is_cpu() && parallel != nullptr) needed *= parallel->size();
  const double free = available(place, std::max(needed, 0.0));
  const auto shortages = from_all_ranks(fabric, needed - free);
  const auto worst = std::ranges::max_element(shortages);
  const double most =
      over_tensor_ranks(context().options.tensor_group, *worst, comm::Reduction::maximum, fabric.device());
  if (most <= 0) return;
  if (most > *worst) {
    throw OutOfMemory(name, cat("to go to ", to_string(next_contexts_.front()->layout.degrees()),
                                ", a rank of another tensor-parallel index lacks ", megabytes(most),
                                ". Nothing was changed; choose higher degrees"));
  }
  throw OutOfMemory(
      name, cat("to go from ", to_string(context().layout.degrees()), " to ",
                to_string(next_contexts_.front()->layout.degrees()), ", ", place.is_cpu() ? "the host" : "the device",
                " of rank ", worst - shortages.begin(), " lacks ", megabytes(*worst), " (here ", megabytes(needed),
                " are needed and ", megabytes(free), " are free). Nothing was changed; choose higher degrees"));
}

int64_t Engine::bytes_of(const FlatState& state, const Flat& flat, bool has_gradient) const {
  const auto& dtypes = flat.dtypes();
  const auto size = [](c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); };
  int64_t bytes = 0;
  const bool piece_is_master = flat.master_is_piece() && dtypes.master == dtypes.compute;
  if (!piece_is_master) bytes += flat.parameter_piece() * size(dtypes.compute);
  if (state.shard < 0) return bytes;
  bytes += flat.chunk() * size(dtypes.master) * (has_gradient ? 2 : 1);
  for (Companion* companion : companions_) {
    for (const auto dtype : companion->dtypes(shards_[static_cast<size_t>(state.shard)])) {
      bytes += flat.chunk() * size(dtype);
    }
  }
  return bytes;
}

}  // namespace tesserae::shard
