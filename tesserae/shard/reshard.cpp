// Turning the dial.
//
//  1. All ranks ask for the same degrees, hold the same kinds of state, and the degrees are possible.
//  2. Nothing is in flight: a step that was cut short is forgotten, accumulated gradients go to their owners.
//  3. The groups of the new degrees are made, or found: the fabric keeps them.
//  4. Each host or device has the memory for the largest moment of step 6.
//  5. Gathered copies and the pool are given up.
//  6. Flat buffer by flat buffer, new parts are filled from the old ones, which are freed; then parameters, gradients,
//     the user's tensors and companions take the new ones.
//  7. The pool is reserved anew, and masters become what the next forward sees.
//
// Up to 4 a failure is one of all ranks and changes nothing (2 changes no value). From 6 on it leaves the model between
// two layouts, which torn_ remembers.

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/os/memory.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/parts.h"

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

Resharding Engine::reshard(const mesh::Degrees& degrees) {
  const auto begin = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  Resharding result{context().layout.degrees(), degrees};
  // 1.
  require_resharding(degrees);
  if (std::ranges::all_of(units_, [&](const UnitState& unit) { return unit.context->layout.degrees() == degrees; })) {
    return result;
  }
  // 2.
  settle();
  const std::vector<bool> gradients = gradients_of_all();
  // 3.
  const auto contexts = contexts_for(degrees);
  // 4.
  require_memory(contexts, gradients);
  // 5.
  torn_ = true;
  context().statistics->pool_misses += context().pool->misses();
  for (auto& unit : units_) unit.context->pool = contexts.front()->pool;
  // 6.
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const int flat : units_[unit].flats) {
      result.bytes +=
          recut(flats_[static_cast<size_t>(flat)], *contexts[unit], gradients[static_cast<size_t>(flat)]);
    }
    units_[unit].context = contexts[unit];
  }
  // 7.
  if (prepared_) reserve_pool();
  for (auto& flat : flats_) flat.parameter->publish();
  torn_ = false;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

// 1.

void Engine::require_resharding(const mesh::Degrees& degrees) const {
  if (torn_) throw_torn();
  if (in_backward()) throw InvalidArgument(name, "called inside a backward; call it between steps");
  std::string held = cat("degrees asked for: ", to_string(degrees), "\n");
  for (const auto& shard : shards_) {
    for (Companion* companion : companions_) {
      held += cat("state of shard ", shard.index, ":");
      for (const auto dtype : companion->dtypes(shard)) held += cat(" ", c10::toString(dtype));
      held += "\n";
    }
  }
  for (const auto& unit : units_) {
    require_agreement(*unit.context->fabric, held);
    if (&unit == &units_.back() || unit.context->fabric == context().fabric) break;
  }
  for (const auto& unit : units_) {
    const mesh::Layout layout(unit.context->fabric->size(), degrees);
    const bool one_reduction = degrees.parameters == degrees.gradients && degrees.gradients == degrees.optimizer &&
                               (degrees.optimizer == 1 || degrees.optimizer == layout.ranks());
    if (unit.context->reduce_hook && !one_reduction) {
      throw InvalidArgument(
          name, cat("unit \"", unit.name, "\" has a hook in place of its reduction, which can not do ", "what ",
                    to_string(degrees), " needs; all three degrees must be 1 or ", layout.ranks()));
    }
  }
}

void Engine::throw_torn() const {
  throw comm::CommError(name, cat("an earlier change of degrees failed half-way on rank ", context().fabric->rank(),
                                  ": its training state is lost. Start the job again from its last checkpoint"));
}

// 2.

void Engine::settle() {
  if (backward_open_) abandon_step();
  take_gradients();
  for (auto& flat : flats_) {
    if (flat.local) flat.local->take_values();
    if (!flat.gradient || !flat.gradient->pending()) continue;
    limit_reductions(context().options.limit_reductions - 1);
    flat.gradient->reduce(/*boundary=*/true);
    reductions_.push_back(flat.gradient.get());
  }
  limit_reductions(0);
  release_all();
  drain();
}

// By flat buffer: whether a rank has a gradient. Those that hold no element of it, or unused ones, may have none.
std::vector<bool> Engine::gradients_of_all() {
  std::vector<bool> found;
  for (const auto& flat : flats_) {
    const bool mine = flat.shard >= 0 && shards_[static_cast<size_t>(flat.shard)].grad.defined();
    const auto all = from_all_ranks(*context(flat.unit).fabric, mine ? 1 : 0);
    found.push_back(std::ranges::max(all) > 0);
  }
  return found;
}

// 3.

std::vector<std::shared_ptr<Context>> Engine::contexts_for(const mesh::Degrees& degrees) const {
  std::map<const Context*, std::shared_ptr<Context>> made;
  std::vector<std::shared_ptr<Context>> contexts;
  for (const auto& unit : units_) {
    const Context& last = *unit.context;
    auto& next = made[&last];
    if (!next) {
      Options options = last.options;
      auto& strategy = options.strategy;
      const bool never_freed = !strategy.free_after_forward && !strategy.free_after_backward;
      if (strategy.degrees.parameters == 1 && never_freed) {
        strategy.free_after_forward = strategy.free_after_backward = true;
      }
      strategy.degrees = degrees;
      next = std::make_shared<Context>(last.fabric, options);
      next->reduce_hook = last.reduce_hook;
      next->statistics = last.statistics;
      next->pool = contexts.empty() ? next->pool : contexts.front()->pool;
    }
    contexts.push_back(next);
  }
  return contexts;
}

// 4.

void Engine::require_memory(const std::vector<std::shared_ptr<Context>>& contexts, const std::vector<bool>& gradients) {
  double used = 0, peak = 0;
  for (size_t i = 0; i < flats_.size(); ++i) {
    const Flat& now = *flats_[i].flat;
    const Flat next(now.unit(), now.slots(), now.dtypes(), now.trainable(),
                    contexts[static_cast<size_t>(flats_[i].unit)]->layout, now.rank());
    const auto bytes = [&](const Flat& flat) { return static_cast<double>(bytes_of(flats_[i], flat, gradients[i])); };
    peak = std::max(peak, used + bytes(next));
    used += bytes(next) - bytes(now);
  }
  comm::Fabric& fabric = *context().fabric;
  const c10::Device device = context().options.offload ? c10::Device(c10::kCPU) : context().device;
  const auto peaks = from_all_ranks(fabric, peak);
  const double needed = device.is_cpu() ? sum_of(peaks, fabric.world().host_ranks(fabric.rank()))
                                        : peaks[static_cast<size_t>(fabric.rank())];
  const double free = available(device, needed);
  const auto shortages = from_all_ranks(fabric, needed - free);
  const auto worst = std::ranges::max_element(shortages);
  if (*worst <= 0) return;
  throw OutOfMemory(
      name, cat("to go from ", to_string(context().layout.degrees()), " to ",
                to_string(contexts.front()->layout.degrees()), ", ", device.is_cpu() ? "the host" : "the device",
                " of rank ", worst - shortages.begin(), " lacks ", megabytes(*worst), " (here ", megabytes(needed),
                " are needed and ", megabytes(free), " are free). Nothing was changed; choose higher degrees"));
}

int64_t Engine::bytes_of(const FlatState& state, const Flat& flat, bool has_gradient) {
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

// 6.

uint64_t Engine::recut(FlatState& state, Context& context, bool has_gradient) {
  Shard* const shard = state.shard < 0 ? nullptr : &shards_[static_cast<size_t>(state.shard)];
  const Flat& from = *state.flat;
  auto flat =
      std::make_unique<Flat>(from.unit(), from.slots(), from.dtypes(), from.trainable(), context.layout, from.rank());
  std::vector<at::Tensor> before{state.parameter->part()};
  if (has_gradient) before.push_back(shard->grad.defined() ? shard->grad : state.gradient->memory().zero_());
  std::vector<size_t> kept;
  for (Companion* companion : companions_) {
    if (shard == nullptr) break;
    for (auto& tensor : companion->take(*shard)) before.push_back(std::move(tensor));
    kept.push_back(before.size());
  }
  const at::Tensor shared = prepared_ ? FlatParameter::shared_memory(context, *flat) : at::Tensor();
  std::vector<at::Tensor> after;
  std::string failure;
  try {
    after.push_back(new_part(context, *flat, shared));
    while (after.size() < before.size()) {
      after.push_back(new_part(context, *flat, before[after.size()].scalar_type()));
    }
  } catch (const std::exception& error) {
    failure = error.what();
  }
  require_parts(*context.fabric, failure, from);
  const uint64_t bytes = move_parts(*context.fabric, from, *flat, before, after);

  const std::vector<at::Tensor> shown = state.local ? state.local->parameters() : std::vector<at::Tensor>();
  ComputeStorage storage(state.parameter->take_storage(), *flat);
  state.local.reset();
  state.parameter.reset();
  before.clear();
  const at::Tensor master = shard != nullptr ? after[0] : at::Tensor();
  state.parameter = std::make_unique<FlatParameter>(context, *flat, std::move(storage), master,
                                                    shard != nullptr ? piece_for(context, *flat, master) : after[0]);
  state.parameter->share(shared);
  if (shard != nullptr) {
    *shard = {shard->index, master, has_gradient ? after[1] : at::Tensor(), flat->slices(flat->chunk_range())};
    state.gradient = std::make_unique<FlatGradient>(context, *flat, *shard);
    state.gradient->adopt(shard->grad);
  }
  state.flat = std::move(flat);
  if (!shown.empty()) {
    state.local = std::make_unique<LocalParameters>(*state.flat, *state.parameter, state.gradient.get(), shown);
    state.local->show_part();
    if (shard != nullptr) state.local->show_gradients(*shard);
  }
  for (size_t i = 0, begin = has_gradient ? 2 : 1; i < kept.size(); begin = kept[i++]) {
    companions_[i]->put(*shard,
                        {after.begin() + static_cast<int64_t>(begin), after.begin() + static_cast<int64_t>(kept[i])});
  }
  return bytes;
}

void Engine::require_parts(comm::Fabric& fabric, const std::string& failure, const Flat& flat) const {
  const auto failed = from_all_ranks(fabric, failure.empty() ? 0 : 1);
  const auto first = std::ranges::max_element(failed);
  if (*first == 0) return;
  throw comm::CommError(
      name, cat("rank ", first - failed.begin(), " has no memory for its part of unit \"", flat.unit(), "\" ", failure,
                ": the training state is between two layouts. Start the job again from its last checkpoint"));
}

}  // namespace tesserae::shard
