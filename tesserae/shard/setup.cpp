// Building an engine: units, flat buffers, the pool.
//
//  1. Units and parameters have been found, and the ranks have compared what they found (shard_model).
//  2. Each unit makes its flat buffers (flat_buffer.cpp): it cuts what this rank holds out of the initial values, one
//     parameter at a time, so that no rank ever holds more than that and one parameter; turns the module's
//     parameters into views of the flat buffer's storage; hooks their gradients.
//  3. Shared copies are made and the pool is reserved.

#include <ATen/core/grad_mode.h>

#include <map>
#include <utility>

#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/same_unsplit.h"

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

// A script that configures split layers and splits none computes everything T times over, with right numbers.
void warn_if_all_is_repeated(const std::vector<std::unique_ptr<ShardedUnit>>& units, const comm::MeshFabric& mesh) {
  const int degree = mesh.degree(mesh::axes::tensor);
  if (degree == 1 || mesh.rank() != 0) return;
  for (const auto& unit : units) {
    for (const auto& buffer : unit->buffers()) {
      for (const Slot& slot : buffer->flat().slots()) {
        if (!slot.split.along(mesh::Axis::tensor).whole()) return;
      }
    }
  }
  log(LogLevel::warning,
      cat("no parameter of this model is split among the ", degree,
          " tensor-parallel ranks: each of them computes all of it. Python: call tsm.transform(model) "
          "before the model is wrapped, or leave tensor_parallel_degree out; C++: docs/tensor.md"));
}

}  // namespace

// 2.

Engine::Engine(std::vector<UnitSpec> specs, std::shared_ptr<comm::Fabric> fabric, Options options,
               std::shared_ptr<void> owner)
    : owner_(std::move(owner)), alive_(std::make_shared<Engine*>(this)) {
  require_possible(options, specs);
  const at::NoGradGuard no_grad;
  const autograd::OrdinaryTensors ordinary;
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
    if (sharding->mesh->degree(mesh::axes::tensor) > 1) units_.back()->attach(std::make_shared<SameUnsplit>());
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
  warn_if_all_is_repeated(units_, *root().sharding().mesh);
  enter(Phase::idle);
  for (FlatBuffer* buffer : buffers_) {
    buffer->parameter().share(buffer->parameter().shared_memory(buffer->flat()));
    buffer->take_room();
  }
  reserve_pool();
}

void Engine::reserve_pool() {
  reserve(plan_of_pool());
}

void Engine::reserve(const std::vector<PoolPart>& parts) {
  for (const PoolPart& part : parts) workspace_->pool.reserve(part.bytes, part.count, part.owner);
}

std::vector<PoolPart> Engine::plan_of_pool() const {
  std::vector<UnitNeeds> needs;
  for (const auto& unit : units_) {
    auto& of_unit = needs.emplace_back(UnitNeeds{unit->name(), !unit->frees_after_forward(), {}});
    for (const auto& buffer : unit->buffers()) {
      const FlatGradient* const gradient = buffer->gradient();
      of_unit.buffers.push_back({.gathered = buffer->parameter().buffer_bytes(),
                                 .reduced = gradient == nullptr ? 0 : gradient->buffer_bytes(),
                                 .gatherer = &buffer->parameter(),
                                 .reducer = gradient});
    }
  }
  const auto& options = root().sharding().options;
  return plan_pool(needs, options.limit_all_gathers, options.limit_reductions);
}

}  // namespace tesserae::shard
