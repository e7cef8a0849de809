#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tesserae/offload/activations.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/step_observer.h"

namespace tesserae::shard {

/// Tells `activations` of the forwards of units: when one begins, when it ends, and what are no activations, namely the
/// unit's gathered parameters and views of them. To be attached to each unit.
class ActivationOffload : public StepObserver {
 public:
  /// `leaves`: by name, the units whose activations leave; unset: all.
  explicit ActivationOffload(std::shared_ptr<offload::Activations> activations,
                             std::function<bool(const std::string& unit)> leaves = {})
      : activations_(std::move(activations)), leaves_(std::move(leaves)) {}

  void begin_step(ShardedUnit& unit, bool accumulating) override;
  void before_forward(ShardedUnit& unit) override;
  void after_forward(ShardedUnit& unit) override;

 protected:
  offload::Activations& activations() const { return *activations_; }

 private:
  std::shared_ptr<offload::Activations> activations_;
  std::function<bool(const std::string& unit)> leaves_;
};

/// What the units of `engine` save for their backwards leaves after their forwards, through autograd/saving.h, and
/// comes back ahead of them; activations.h has the rules. Between steps, once an engine. Values stay what they are, to
/// the bit. With recomputation that is the inputs of units. `leaves`: as above. Throws InvalidArgument in a process
/// with Python.
void offload_activations(const Engine& engine, const std::shared_ptr<offload::Activations>& activations,
                         const std::function<bool(const std::string& unit)>& leaves = {});

}  // namespace tesserae::shard
