// Building an engine: units, flat buffers, the pool.
//
//  1. Units and parameters have been found, and the ranks have compared what they found (shard_model).
//  2. Each unit makes its flat buffers (flat_buffer.cpp): it cuts what this rank holds out of the initial values, one
//     parameter at a time, so that no rank ever holds more than that and one parameter; turns the module's
//     parameters into views of the flat buffer's storage; hooks their gradients.
//  3. Shared copies are made and the pool is reserved.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"

namespace tesserae::shard {
namespace {

void require_possible(const Options& options, const std::vector<UnitSpec>& specs) {
  if (options.limit_all_gathers < 1 || options.limit_reductions < 1) {
    throw InvalidArgument("shard_model",
                          cat("limit_all_gathers (", options.limit_all_gathers, ") and limit_reductions (",
                              options.limit_reductions, ") must be at least 1"));
  }
  const bool exact = options.parameter_wire == comm::Wire::exact && options.gradient_wire == comm::Wire::exact;
  if (!exact && options.mesh != nullptr && options.mesh->degree(mesh::axes::tensor) > 1) {
    // A parameter that all tensor-parallel ranks have shares its scale with others that differ: they would drift apart.
    throw InvalidArgument(
        "shard_model", cat("parameters travel as ", options.parameter_wire, " and gradients as ", options.gradient_wire,
                           ", but layers are split over ", options.mesh->degree(mesh::axes::tensor),
                           " tensor-parallel ranks: leave both exact (wire.*)"));
  }
  for (const auto& spec : specs) {
    if (spec.handle->has_unit()) {
      throw InvalidArgument("shard_model", cat("unit \"", spec.name, "\" belongs to a sharded model already"));
    }
  }
}

// The fabric that shards state that is sharded over `axes`; `state`: that of all which is not split otherwise.
std::shared_ptr<comm::Fabric> ranks_of(mesh::AxisSet axes, const std::shared_ptr<comm::Fabric>& state,
                                       const Options& options) {
  if (axes == mesh::axes::state) return state;
  if (options.mesh != nullptr) return options.mesh->over(axes);
  throw InvalidArgument("shard_model", cat("the model has parameters whose state is sharded over ", to_string(axes),
                                           "; pass Options::mesh that it was built with"));
}

// How many units with parameters lie one inside the other at most, the root apart: a step works with so many at once.
int nesting(const std::vector<std::unique_ptr<ShardedUnit>>& units) {
  std::vector<int> depths;
  int most = 1;
  for (size_t i = 1; i < units.size(); ++i) {
    int depth = 0;
    for (size_t k = 1; k < i; ++k) {  // parents come first
      if (units[i]->name().starts_with(units[k]->name() + ".")) depth = std::max(depth, depths[k - 1]);
    }
    depths.push_back(depth + (units[i]->buffers().empty() ? 0 : 1));
    most = std::max(most, depths.back());
  }
  return most;
}

}  // namespace

// 2.

Engine::Engine(std::vector<UnitSpec> specs, std::shared_ptr<comm::Fabric> fabric, Options options,
               std::shared_ptr<void> owner)
    : owner_(std::move(owner)), alive_(std::make_shared<Engine*>(this)) {
  require_possible(options, specs);
  const at::NoGradGuard no_grad;
  workspace_ = std::make_shared<Workspace>(Workspace{Pool(fabric->device(), options.elastic)});
  std::map<mesh::AxisSet, std::shared_ptr<const Sharding>> shardings;  // units over the same ranks share one
  for (const auto& spec : specs) {
    const mesh::AxisSet axes = state_axes(spec);
    auto& sharding = shardings[axes];
    if (sharding == nullptr) {
      sharding = std::make_shared<const Sharding>(ranks_of(axes, fabric, options), options, axes);
    }
    units_.push_back(
        std::make_unique<ShardedUnit>(*this, static_cast<int>(units_.size()), spec, UnitContext{sharding, workspace_}));
  }
  list_buffers();
}

Engine::~Engine() {
  alive_.reset();
  drain();
}

void Engine::list_buffers() {
  buffers_.clear();
  std::vector<Shard*> shards;
  for (const auto& unit : units_) {
    for (const auto& buffer : unit->buffers()) {
      buffers_.push_back(buffer.get());
      if (buffer->shard() == nullptr) continue;
      buffer->shard()->index = static_cast<int>(shards.size());
      shards.push_back(buffer->shard());
    }
  }
  shards_ = ShardList(std::move(shards));
}

void Engine::adopt(Engine& inner, const std::string& name) {
  if (prepared() || inner.prepared()) {
    throw InvalidArgument("Engine::adopt", cat("unit \"", name, "\" cannot join the model around it: one of them has ",
                                               "run a step already. Wrap the whole model before its first forward"));
  }
  workspace_->statistics.allocations += inner.workspace_->statistics.allocations;
  auto units = std::exchange(inner.units_, {});
  for (auto& unit : units) {
    unit->join(*this, static_cast<int>(units_.size()), name, workspace_);
    units_.push_back(std::move(unit));
  }
  inner.list_buffers();
  list_buffers();
}

// 3.

void Engine::prepare() {
  const at::NoGradGuard no_grad;
  enter(Phase::idle);
  for (FlatBuffer* buffer : buffers_) {
    const UnitContext& context = buffer->unit().context();
    if (!buffer->parameter().extended() && context.gatherer == nullptr) {
      buffer->parameter().share(FlatParameter::shared_memory(context, buffer->flat()));
    }
    buffer->take_room();
  }
  reserve_pool();
}

// Units that are gathered one after the other share buffers; the root, and every unit if forward does not free, has its
// own. Buffers are counted per position within the unit (most units have one flat buffer), with the size of the
// largest. Where units lie inside others, the outer ones hold theirs meanwhile.
void Engine::reserve_pool() {
  const auto& options = root().sharding().options;
  Pool& pool = workspace_->pool;
  std::vector<int64_t> gather_bytes, reduce_bytes;
  const auto raise = [](std::vector<int64_t>& largest, size_t position, int64_t bytes) {
    if (largest.size() <= position) largest.resize(position + 1, 0);
    largest[position] = std::max(largest[position], bytes);
  };
  const int inner_units = static_cast<int>(units_.size()) - 1;
  for (const auto& unit : units_) {
    const bool is_root = unit.get() == &root();
    for (size_t position = 0; position < unit->buffers().size(); ++position) {
      const FlatBuffer& buffer = *unit->buffers()[position];
      const int64_t gathered = buffer.parameter().buffer_bytes();
      if (gathered > 0) {
        if (is_root || !unit->frees_after_forward()) {
          pool.reserve(gathered, 1, &buffer.parameter());
        } else {
          raise(gather_bytes, position, gathered);
        }
      }
      if (buffer.gradient() == nullptr) continue;
      if (is_root) {
        pool.reserve(buffer.gradient()->buffer_bytes(), 1, buffer.gradient());
      } else {
        raise(reduce_bytes, position, buffer.gradient()->buffer_bytes());
      }
    }
  }
  const int nested = nesting(units_);
  const int gathers = std::max(options.limit_all_gathers, nested), reductions = options.limit_reductions + nested - 1;
  for (const int64_t bytes : gather_bytes) pool.reserve(bytes, std::min(gathers, inner_units));
  for (const int64_t bytes : reduce_bytes) pool.reserve(bytes, std::min(reductions, inner_units));
}

}  // namespace tesserae::shard
