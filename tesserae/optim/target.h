#pragma once

#include <functional>
#include <vector>

#include "tesserae/shard/shard.h"

namespace tesserae::shard {
class Sharded;
}

namespace tesserae::optim {

/// What this layer needs of a sharded model. Cheap to copy; what it points to outlives it.
struct Target {
  std::vector<shard::Shard>* shards = nullptr;
  std::function<void(int index)> publish;  ///< called for each updated shard, in order, as soon as it has new values
  std::function<void()> zero_grad;         ///< forgets all gradients
  /// Collective: adds up what each rank computed from its own chunks, counting chunks that have replicas once.
  std::function<double(double value)> sum_over_chunks;
};

/// The target of a live model. `sharded` outlives it and is not moved.
Target target_of(shard::Sharded& sharded);

/// The target of shards that one process holds alone: sums are its own, zero_grad undefines the gradients.
Target target_of(std::vector<shard::Shard>& shards, std::function<void(int)> publish = {});

}  // namespace tesserae::optim
