#include "tesserae/shard/activation_offload.h"

#include "tesserae/autograd/backward.h"
#include "tesserae/autograd/saving.h"

namespace tesserae::shard {
namespace {

/// Saves what units compute in C++.
class SavesActivations final : public ActivationOffload, public autograd::Saving {
 public:
  using ActivationOffload::ActivationOffload;

  std::function<at::Tensor()> save(const at::Tensor& tensor) override {
    auto saved = activations().put(tensor);
    if (saved == nullptr) return {};
    return [saved = std::move(saved)] { return saved->take(); };
  }
};

/// Saves through it while any of the engine's units is in its forward. Attached to the root only, whose forward is
/// around the others.
class WhileTheRootComputes final : public StepObserver {
 public:
  explicit WhileTheRootComputes(std::shared_ptr<autograd::Saving> saving) : saving_(std::move(saving)) {}

  void begin_step(ShardedUnit& /*unit*/, bool /*accumulating*/) override { autograd::set_saving(saving_); }
  void after_forward(ShardedUnit& /*unit*/) override { autograd::set_saving({}); }
  void begin_backward(ShardedUnit& /*unit*/, bool /*boundary*/) override { autograd::set_saving({}); }

 private:
  std::shared_ptr<autograd::Saving> saving_;
};

}  // namespace

void ActivationOffload::begin_step(ShardedUnit& unit, bool /*accumulating*/) {
  if (unit.index() == 0) activations_->forget_units();
}

void ActivationOffload::before_forward(ShardedUnit& unit) {
  if (autograd::in_backward()) return;
  for (const auto& buffer : unit.buffers()) {
    for (const at::Tensor& parameter : buffer->tensors()) activations_->keep(parameter);
  }
  activations_->begin_unit(!leaves_ || leaves_(unit.name()));
}

void ActivationOffload::after_forward(ShardedUnit& /*unit*/) {
  activations_->end_unit();
}

void offload_activations(const Engine& engine, const std::shared_ptr<offload::Activations>& activations,
                         const std::function<bool(const std::string& unit)>& leaves) {
  const auto saves = std::make_shared<SavesActivations>(activations, leaves);
  engine.root().attach(std::make_shared<WhileTheRootComputes>(saves));
  for (const auto& unit : engine.units()) unit->attach(saves);
}

}  // namespace tesserae::shard
