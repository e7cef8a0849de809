#include "tesserae/shard/whole_model.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "tesserae/autograd/ordinary_tensors.h"
#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/engine.h"

namespace tesserae::shard {
void visit_parameters(Engine& engine, const std::function<void(const std::string&, at::Tensor)>& visit,
                      bool writeback) {
  engine.require_not_torn();
  engine.complete_updates();
  const at::NoGradGuard no_grad;
  const autograd::OrdinaryTensors ordinary;
  for (const FlatBuffer* buffer : engine.buffers()) {
    FlatParameter& parameter = buffer->parameter();
    const at::Tensor whole = parameter.whole_values(parameter.local());
    ++buffer->unit().context().statistics().allocations;
    for (const Slot& slot : buffer->flat().slots()) {
      const at::Tensor tensor = slot.shaped(whole.narrow(0, slot.begin, slot.elements));
      for (const auto& name : slot.names) visit(name, tensor);
    }
    if (!writeback) continue;
    parameter.set_values(whole);
    buffer->unit().publish({&parameter});
  }
}

int64_t parameter_count(const Engine& engine) {
  int64_t count = 0;
  for (const FlatBuffer* buffer : engine.buffers()) {
    for (const Slot& slot : buffer->flat().slots()) count += c10::multiply_integers(slot.whole);
  }
  return count;
}

std::string describe(const Engine& engine) {
  std::vector<UnitSpec> specs;
  std::string text;
  for (const auto& unit : engine.units()) {
    const Options& options = unit->sharding().options;
    text +=
        cat("degrees of unit \"", unit->name(), "\": ", to_string(options.strategy.degrees), "\n", wires_of(options));
    UnitSpec spec{unit->name(), -1, nullptr, {}};
    for (const auto& buffer : unit->buffers()) {
      const Flat& flat = buffer->flat();
      spec.flats.push_back({flat.slots(), {}, {}, flat.dtypes().compute, flat.trainable(), flat.cut_by()});
    }
    specs.push_back(std::move(spec));
  }
  return text + describe(specs);
}

comm::Fabric& state_ranks(const Engine& engine) {
  const Sharding& sharding = *engine.root().context().sharding;
  return sharding.axes == mesh::axes::state ? *sharding.fabric : *sharding.mesh->over(mesh::axes::state);
}

double sum_over_ranks(const Engine& engine, double value) {
  return sums_over_ranks(engine, {value}).front();
}

std::vector<double> sums_over_ranks(const Engine& engine, const std::vector<double>& values) {
  const UnitContext& context = engine.root().context();
  return comm::sums_over_ranks(state_ranks(engine), values, {"", context.statistics().steps});
}

double max_over_ranks(const Engine& engine, double value) {
  const UnitContext& context = engine.root().context();
  return comm::max_over_ranks(state_ranks(engine), value, {"", context.statistics().steps});
}

}  // namespace tesserae::shard
