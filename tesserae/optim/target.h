#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tesserae/shard/companion.h"
#include "tesserae/shard/shard.h"

namespace tesserae::shard {
class Engine;
class Sharded;
}  // namespace tesserae::shard

namespace tesserae::optim {

/// What this layer needs of a sharded model. Cheap to copy; what it points to outlives it.
struct Target {
  std::vector<shard::Shard>* shards = nullptr;
  std::function<void(int index)> publish;  ///< called for each updated shard, in order, as soon as it has new values
  std::function<void()> zero_grad;         ///< forgets all gradients
  /// The companion's tensors move with the shards until what is returned is dropped. Unset where shards never move.
  std::function<std::shared_ptr<void>(shard::Companion& companion)> attach;
  /// What this rank counts of its chunk in a sum over all ranks: one over the number of replicas.
  std::function<double(int index)> share;
  /// Whether this rank counts the parameters that all tensor-parallel ranks hold whole: true on one of them. The parts
  /// of split parameters are counted by each.
  bool counts_repeated = true;
  /// Collective over data- and tensor-parallel ranks: adds up what each rank computed from its own chunks, each counted
  /// by its share.
  std::function<double(double value)> sum_over_chunks;
  /// Collective: the largest of what each rank computed from its own chunks.
  std::function<double(double value)> max_over_chunks;
};

/// The target of a live model, which outlives it.
Target target_of(shard::Sharded& sharded);
Target target_of(shard::Engine& engine);

/// The target of shards that one process holds alone: sums are its own, zero_grad undefines the gradients.
Target target_of(std::vector<shard::Shard>& shards, std::function<void(int)> publish = {});

}  // namespace tesserae::optim
