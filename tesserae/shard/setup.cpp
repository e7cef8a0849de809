// Building an engine: who owns what, initial values, buffers, hooks.
//
//  1. Units and parameters have been found, and the ranks have compared what they found (shard_model).
//  2. Per flat buffer: cut this rank's chunk (master) and parameter piece out of the initial values, one parameter at a
//  time,
//     so that no rank ever holds more than its own part and one parameter.
//  3. Turn the module's parameters into views of the flat buffer's storage, and hook their gradients.
//  4. Reserve the pool.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/parts.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::shard {
namespace {

Flat::Dtypes dtypes_of(const FlatSpec& spec, const Precision& precision) {
  if (!c10::isFloatingType(spec.dtype)) return {spec.dtype, spec.dtype, spec.dtype};
  const auto compute = precision.parameters.value_or(spec.dtype);
  return {compute, precision.reduce.value_or(compute), precision.masters.value_or(spec.dtype)};
}

// Copies the part of `parameter` (the slot's values, flattened) that lies in `range` of the flat buffer to
// `destination`, which holds exactly that range.
void copy_part(const Slot& slot, const at::Tensor& values, const mesh::Range& range, const at::Tensor& destination) {
  const int64_t begin = std::max(slot.begin, range.begin);
  const int64_t end = std::min(slot.end(), range.end);
  if (begin >= end) return;
  destination.narrow(0, begin - range.begin, end - begin).copy_(values.narrow(0, begin - slot.begin, end - begin));
}

void require_tensor_group(const Slot& slot, const comm::Group* group) {
  const int ranks = group == nullptr ? 1 : group->size();
  if (slot.split.whole() || (slot.split.parts == ranks && slot.split.index == group->rank())) return;
  throw InvalidArgument("shard_model",
                        cat("parameter ", slot.names.front(), " is part ", slot.split.index, " of ", slot.split.parts,
                            ", but Options::tensor_group has ", ranks, ranks == 1 ? " rank" : " ranks",
                            "; pass the group of the tensor-parallel ranks that the model was built with"));
}

// The initial values of one parameter, flattened, on the device.
at::Tensor initial_values(Context& context, const Slot& slot, const at::Tensor& parameter, c10::ScalarType master) {
  at::Tensor values;
  if (parameter.is_meta()) {
    const auto& initialize = context.options.initialize;
    if (!initialize) {
      throw InvalidArgument("shard_model", cat("parameter ", slot.names.front(), " is on the meta device and ",
                                               "Options::initialize is not set, so it would have no values"));
    }
    values = at::empty(slot.whole, at::TensorOptions().dtype(master).device(context.device));
    initialize(slot.names.front(), values);
    values = tensor::part_of(values, slot.split);
  } else {
    values = parameter.detach().to(context.device).contiguous();
  }
  values = values.view({-1});
  comm::Group* const parallel = context.options.tensor_group;
  const bool repeated = slot.split.whole() && parallel != nullptr && parallel->size() > 1;
  if (context.options.sync_module_states && (repeated || context.fabric->size() > 1)) {
    values = values.clone();
    if (repeated) parallel->broadcast(values, 0, {slot.names.front()});
    context.fabric->everyone().broadcast(values, 0, {slot.names.front()});
  }
  return values;
}

}  // namespace

Engine::Engine(std::vector<UnitSpec> specs, std::shared_ptr<comm::Fabric> fabric, Options options,
               std::shared_ptr<void> owner)
    : owner_(std::move(owner)), alive_(std::make_shared<Engine*>(this)) {
  if (options.limit_all_gathers < 1 || options.limit_reductions < 1) {
    throw InvalidArgument("shard_model",
                          cat("limit_all_gathers (", options.limit_all_gathers, ") and limit_reductions (",
                              options.limit_reductions, ") must be at least 1"));
  }
  const bool exact = options.parameter_wire == comm::Wire::exact && options.gradient_wire == comm::Wire::exact;
  if (!exact && options.tensor_group != nullptr && options.tensor_group->size() > 1) {
    // A parameter that all tensor-parallel ranks have shares its scale with others that differ: they would drift apart.
    throw InvalidArgument(
        "shard_model", cat("parameters travel as ", options.parameter_wire, " and gradients as ", options.gradient_wire,
                           ", but layers are split over ", options.tensor_group->size(),
                           " tensor-parallel ranks: leave both exact (wire.*)"));
  }
  for (const auto& spec : specs) {
    if (spec.handle->attached()) {
      throw InvalidArgument("shard_model", cat("unit \"", spec.name, "\" belongs to a sharded model already"));
    }
  }
  build(specs, std::make_shared<Context>(std::move(fabric), options));
}

Engine::~Engine() {
  alive_.reset();
  drain();
  for (auto& unit : units_) {
    if (unit.handle != nullptr) unit.handle->attach(nullptr, -1);
  }
}

void Engine::drain() {
  for (auto& unit : units_) {
    unit.context->gather_lane.drain();
    unit.context->reduce_lane.drain();
  }
}

void Engine::build(const std::vector<UnitSpec>& specs, const std::shared_ptr<Context>& context) {
  const at::NoGradGuard no_grad;
  for (const auto& spec : specs) {
    const int unit = unit_count();
    units_.push_back({spec.name.empty() ? "root" : spec.name, spec.handle, context, {}});
    for (const auto& flat : spec.flats) build_flat(unit, flat);
    spec.handle->attach(this, unit);
  }
  // Shards are complete and keep their addresses from here on.
  for (size_t i = 0; i < flats_.size(); ++i) connect_gradients(static_cast<int>(i));
}

void Engine::connect_gradients(int index) {
  FlatState& state = flats_[static_cast<size_t>(index)];
  if (!state.flat->trainable()) return;
  Shard& shard = shards_[static_cast<size_t>(state.shard)];
  if (state.gradient) {
    state.gradient->bind(shard);
  } else {
    state.gradient =
        std::make_unique<FlatGradient>(*units_[static_cast<size_t>(state.unit)].context, *state.flat, shard);
  }
  if (state.hooks) return;
  state.hooks = std::make_unique<autograd::GradientHooks>(
      state.tensors, [this, index](int slot, const at::Tensor& gradient) { on_gradient(index, slot, gradient); },
      [this, index](int slot) { return place_of_gradient(index, slot); });
}

void Engine::build_flat(int unit, const FlatSpec& spec) {
  Context& context = this->context(unit);
  const auto dtypes = dtypes_of(spec, context.options.precision);
  FlatState state;
  state.unit = unit;
  state.flat = std::make_unique<Flat>(unit_name(unit), spec.slots, dtypes, spec.trainable, context.layout,
                                      context.fabric->rank());
  state.tensors = spec.parameters;
  const Flat& flat = *state.flat;

  at::Tensor master, piece;
  // Padding must be finite: it travels with the rest.
  if (flat.trainable()) master = new_part(context, flat, dtypes.master).zero_();
  piece = flat.trainable() ? piece_for(context, flat, master) : new_part(context, flat, dtypes.compute).zero_();
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const Slot& slot = flat.slots()[i];
    require_tensor_group(slot, context.options.tensor_group);
    const at::Tensor values = initial_values(context, slot, spec.parameters[i], dtypes.master);
    if (master.defined()) copy_part(slot, values, flat.chunk_range(), master);
    if (piece.defined() && !flat.master_is_piece()) copy_part(slot, values, flat.parameter_range(), piece);
  }

  if (flat.trainable()) {
    state.shard = static_cast<int>(shards_.size());
    shards_.push_back({state.shard, master, {}, flat.slices(flat.chunk_range())});
  } else {
    units_[static_cast<size_t>(unit)].has_frozen = true;
  }
  state.parameter = std::make_unique<FlatParameter>(
      context, flat, ComputeStorage(flat, context.device, spec.parameters), master, piece);
  units_[static_cast<size_t>(unit)].flats.push_back(static_cast<int>(flats_.size()));
  flats_.push_back(std::move(state));
}

void Engine::show_parameters(int unit, const std::vector<std::vector<at::Tensor>>& parameters) {
  shows_parameters_ = true;
  const auto& flats = units_[static_cast<size_t>(unit)].flats;
  for (size_t i = 0; i < flats.size(); ++i) {
    FlatState& state = flats_[static_cast<size_t>(flats[i])];
    state.local = std::make_unique<LocalParameters>(*state.flat, *state.parameter, state.gradient.get(), parameters[i]);
    state.local->show_part();
  }
}

void Engine::set_master_dtype(int unit, c10::ScalarType dtype) {
  if (prepared_ || !c10::isFloatingType(dtype)) {
    throw InvalidArgument("Engine::set_master_dtype",
                          cat(c10::toString(dtype), " for unit \"", unit_name(unit), "\"",
                              prepared_ ? ", which has run a step already: change dtypes before the first forward"
                                        : ": masters are floating-point numbers"));
  }
  const at::NoGradGuard no_grad;
  for (const int index : units_[static_cast<size_t>(unit)].flats) {
    FlatState& state = flats_[static_cast<size_t>(index)];
    if (state.shard < 0 || state.flat->dtypes().master == dtype) continue;
    Shard& shard = shards_[static_cast<size_t>(state.shard)];
    state.flat->set_master_dtype(dtype);
    state.parameter->cast_master();
    shard.master = state.parameter->part();
    shard.grad = at::Tensor();
    ++context(unit).statistics->allocations;
    if (state.local) state.local->show_part();
  }
}

void Engine::adopt(Engine& inner, const std::string& name) {
  if (prepared_ || inner.prepared_) {
    throw InvalidArgument("Engine::adopt", cat("unit \"", name, "\" can not join the model around it: one of them has ",
                                               "run a step already. Wrap the whole model before its first forward"));
  }
  const int first_unit = unit_count();
  const int first_flat = static_cast<int>(flats_.size());
  for (auto& unit : inner.units_) {
    unit.context->pool = context().pool;
    if (unit.context->statistics != context().statistics) {
      context().statistics->allocations += std::exchange(unit.context->statistics->allocations, 0);
    }
    unit.name = unit.name == "root" ? name : cat(name, ".", unit.name);
    for (int& flat : unit.flats) flat += first_flat;
    if (unit.handle != nullptr) unit.handle->attach(this, unit_count());
    units_.push_back(std::move(unit));
  }
  for (auto& unit : units_) unit.context->statistics = context().statistics;
  for (auto& flat : inner.flats_) {
    flat.unit += first_unit;
    flat.hooks.reset();  // it calls the engine that the flat buffer leaves
    flat.flat->rename(name);
    if (flat.shard >= 0) {
      Shard shard = std::move(inner.shards_[static_cast<size_t>(flat.shard)]);
      flat.shard = shard.index = static_cast<int>(shards_.size());
      shard.slices = flat.flat->slices(flat.flat->chunk_range());
      shards_.push_back(std::move(shard));
    }
    flats_.push_back(std::move(flat));
  }
  shows_parameters_ = shows_parameters_ || inner.shows_parameters_;
  inner.units_.clear();
  inner.flats_.clear();
  inner.shards_.clear();
  for (size_t i = 0; i < flats_.size(); ++i) connect_gradients(static_cast<int>(i));
}

void Engine::prepare() {
  const at::NoGradGuard no_grad;
  prepared_ = true;
  for (auto& flat : flats_) flat.parameter->share(FlatParameter::shared_memory(context(flat.unit), *flat.flat));
  reserve_pool();
}

// Units that are gathered one after the other share buffers; the root, and every unit if forward does not free, has its
// own. Buffers are counted per position within the unit (most units have one flat buffer), with the size of the
// largest.
void Engine::reserve_pool() {
  const auto& options = context().options;
  Pool& pool = *context().pool;
  std::vector<int64_t> gather_bytes, reduce_bytes;
  const auto raise = [](std::vector<int64_t>& largest, size_t position, int64_t bytes) {
    if (largest.size() <= position) largest.resize(position + 1, 0);
    largest[position] = std::max(largest[position], bytes);
  };
  int inner_units = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    inner_units += unit > 0;
    for (size_t position = 0; position < units_[unit].flats.size(); ++position) {
      const FlatState& flat = flats_[units_[unit].flats[position]];
      const int64_t gathered = flat.parameter->buffer_bytes();
      if (gathered > 0) {
        if (unit == 0 || !context(static_cast<int>(unit)).options.strategy.free_after_forward) {
          pool.reserve(gathered, 1, flat.parameter.get());
        } else {
          raise(gather_bytes, position, gathered);
        }
      }
      if (!flat.gradient) continue;
      if (unit == 0) {
        pool.reserve(flat.gradient->buffer_bytes(), 1, flat.gradient.get());
      } else {
        raise(reduce_bytes, position, flat.gradient->buffer_bytes());
      }
    }
  }
  for (const int64_t bytes : gather_bytes) pool.reserve(bytes, std::min(options.limit_all_gathers, inner_units));
  for (const int64_t bytes : reduce_bytes) pool.reserve(bytes, std::min(options.limit_reductions, inner_units));
}

}  // namespace tesserae::shard
