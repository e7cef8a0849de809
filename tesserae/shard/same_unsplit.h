#pragma once

#include "tesserae/shard/step_observer.h"

namespace tesserae::shard {

/// Tensor-parallel ranks must begin with the same values of what they do not split (norms, biases, routers, adapters):
/// from others they train a model that none of them has, and no number says so. Before its first forward each unit
/// compares them, this rank's chunk with that of the same place on the other tensor-parallel ranks; 16 bytes a
/// parameter travel. Throws comm::Mismatch on all of these ranks. Where a new rank takes a lost one's place nobody
/// compares: the others have done so.
class SameUnsplit final : public StepObserver {
 public:
  void before_forward(ShardedUnit& unit) override;
  void after_rejoin(ShardedUnit& /*unit*/) override { compared_ = true; }

 private:
  bool compared_ = false;
};

}  // namespace tesserae::shard
