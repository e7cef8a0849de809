// Building an engine: who owns what, initial values, buffers, hooks.
//
//  1. Find units and parameters; all ranks compare what they found.
//  2. Per flat buffer: cut this rank's chunk (master) and parameter piece out of the initial values, one parameter at a
//  time,
//     so that no rank ever holds more than its own part and one parameter.
//  3. Turn the module's parameters into views of the flat buffer's storage, and hook their gradients.
//  4. Reserve the pool.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/unit.h"

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

// The initial values of one parameter, flattened, on the device.
at::Tensor initial_values(Context& context, const Slot& slot, const at::Tensor& parameter, c10::ScalarType master) {
  at::Tensor values;
  if (parameter.is_meta()) {
    const auto& initialize = context.options.initialize;
    if (!initialize) {
      throw InvalidArgument("shard_model", cat("parameter ", slot.names.front(), " is on the meta device and ",
                                               "Options::initialize is not set, so it would have no values"));
    }
    values = at::empty(slot.shape, at::TensorOptions().dtype(master).device(context.device));
    initialize(slot.names.front(), values);
  } else {
    values = parameter.detach().to(context.device).contiguous();
  }
  values = values.view({-1});
  if (context.options.sync_module_states && context.fabric->size() > 1) {
    values = values.clone();
    context.fabric->everyone().broadcast(values, 0, {slot.names.front()});
  }
  return values;
}

}  // namespace

Engine::Engine(std::shared_ptr<torch::nn::Module> model, std::shared_ptr<comm::Fabric> fabric, Options options)
    : model_(std::move(model)), context_(std::move(fabric), options), alive_(std::make_shared<Engine*>(this)) {
  if (options.limit_all_gathers < 1 || options.limit_reductions < 1) {
    throw InvalidArgument("shard_model",
                          cat("limit_all_gathers (", options.limit_all_gathers, ") and limit_reductions (",
                              options.limit_reductions, ") must be at least 1"));
  }
  const auto specs = discover_units(*model_);
  for (const auto& spec : specs) {
    if (spec.base->engine_ != nullptr) {
      throw InvalidArgument("shard_model", cat("unit \"", spec.name, "\" belongs to a sharded model already"));
    }
  }
  require_agreement(*context_.fabric, cat(to_string(options.strategy.degrees), "\n", describe(specs)));
  build(specs);
  reserve_pool();
}

Engine::~Engine() {
  alive_.reset();
  context_.gather_lane.drain();
  context_.reduce_lane.drain();
  for (auto& unit : units_) unit.base->engine_ = nullptr;
}

void Engine::build(const std::vector<UnitSpec>& specs) {
  const at::NoGradGuard no_grad;
  units_.resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    names_.push_back(specs[i].name.empty() ? "root" : specs[i].name);
    units_[i].base = specs[i].base;
    for (const auto& flat : specs[i].flats) build_flat(static_cast<int>(i), flat);
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    units_[i].base->engine_ = this;
    units_[i].base->unit_ = static_cast<int>(i);
  }
  // Shards are complete and keep their addresses from here on.
  for (size_t i = 0; i < flats_.size(); ++i) {
    FlatState& state = flats_[i];
    if (!state.flat->trainable()) continue;
    state.gradient = std::make_unique<FlatGradient>(context_, *state.flat, shards_[state.shard]);
    state.hooks = std::make_unique<GradientHooks>(state.tensors, [this, i](int slot, const at::Tensor& gradient) {
      on_gradient(static_cast<int>(i), slot, gradient);
    });
  }
}

void Engine::build_flat(int unit, const FlatSpec& spec) {
  const auto dtypes = dtypes_of(spec, context_.options.precision);
  FlatState state;
  state.flat = std::make_unique<Flat>(names_[unit], spec.slots, dtypes, spec.trainable, context_.layout,
                                      context_.fabric->rank());
  state.tensors = spec.parameters;
  const Flat& flat = *state.flat;

  // Padding must be finite: it travels with the rest.
  const auto memory = [&](int64_t elements, c10::ScalarType dtype) {
    ++context_.statistics.allocations;
    return at::zeros({elements}, at::TensorOptions().dtype(dtype).device(context_.device));
  };
  at::Tensor master, piece;
  if (flat.trainable()) master = memory(flat.chunk(), dtypes.master);
  if (!flat.master_is_piece()) {
    piece = memory(flat.parameter_piece(), dtypes.compute);
  } else if (dtypes.master == dtypes.compute) {
    piece = master;
  }
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const Slot& slot = flat.slots()[i];
    const at::Tensor values = initial_values(context_, slot, spec.parameters[i], dtypes.master);
    if (master.defined()) copy_part(slot, values, flat.chunk_range(), master);
    if (piece.defined() && !flat.master_is_piece()) copy_part(slot, values, flat.parameter_range(), piece);
  }

  if (flat.trainable()) {
    state.shard = static_cast<int>(shards_.size());
    shards_.push_back({state.shard, master, {}, flat.slices(flat.chunk_range())});
  } else {
    units_[unit].has_frozen = true;
  }
  state.parameter = std::make_unique<FlatParameter>(context_, flat, spec.parameters, master, piece);
  units_[unit].flats.push_back(static_cast<int>(flats_.size()));
  flats_.push_back(std::move(state));
}

// Units that are gathered one after the other share buffers; the root, and every unit if forward does not free, has its
// own. Buffers are counted per position within the unit (most units have one flat buffer), with the size of the
// largest.
void Engine::reserve_pool() {
  const auto& options = context_.options;
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
        if (unit == 0 || !options.strategy.free_after_forward) {
          context_.pool.reserve(gathered, 1);
        } else {
          raise(gather_bytes, position, gathered);
        }
      }
      if (!flat.gradient) continue;
      if (unit == 0) {
        context_.pool.reserve(flat.gradient->buffer_bytes(), 1);
      } else {
        raise(reduce_bytes, position, flat.gradient->buffer_bytes());
      }
    }
  }
  for (const int64_t bytes : gather_bytes)
    context_.pool.reserve(bytes, std::min(options.limit_all_gathers, inner_units));
  for (const int64_t bytes : reduce_bytes)
    context_.pool.reserve(bytes, std::min(options.limit_reductions, inner_units));
}

}  // namespace tesserae::shard
