#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "tesserae/shard/companion.h"
#include "tesserae/shard/flat_buffer.h"

namespace tesserae::shard {

/// What the replicas of a buffer's chunk hold alike: the master, and what `companions` keep of it, which stay where
/// they are.
inline std::vector<at::Tensor> replicated_values(FlatBuffer& buffer, const std::vector<Companion*>& companions) {
  std::vector<at::Tensor> values{buffer.parameter().local()};
  if (buffer.shard() == nullptr) return values;
  for (Companion* companion : companions) {
    std::vector<at::Tensor> kept = companion->take(*buffer.shard());
    std::ranges::copy(kept, std::back_inserter(values));
    companion->put(*buffer.shard(), std::move(kept));
  }
  return values;
}

}  // namespace tesserae::shard
