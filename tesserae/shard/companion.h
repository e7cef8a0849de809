#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/shard/shard.h"

namespace tesserae::shard {

/// Keeps tensors of a shard's shape beside the shards: an optimizer's state. When shards are cut anew (Engine::reshard)
/// its tensors are, too. Called on the thread that trains, shard by shard, so that never more than one is held twice.
class Companion {
 public:
  virtual ~Companion() = default;

  /// The dtypes of what there is for that shard, the same on all ranks; empty: nothing yet.
  virtual std::vector<c10::ScalarType> dtypes(const Shard& shard) = 0;
  /// Hands it over, and keeps nothing: tensors of [chunk], on the master's device. put() follows, unless the change
  /// fails.
  virtual std::vector<at::Tensor> take(const Shard& shard) = 0;
  /// The same tensors, cut as `shard` is now.
  virtual void put(const Shard& shard, std::vector<at::Tensor> tensors) = 0;
};

}  // namespace tesserae::shard
