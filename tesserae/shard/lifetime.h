#pragma once

#include "tesserae/shard/options.h"

namespace tesserae::shard {

inline bool on_disk(const Options& options) {
  return options.tiers.parameters == offload::Tier::disk;
}

/// Whether gathered parameters are freed when a forward ends, or a backward (`lifetime` says which): what was offloaded
/// so that it need not be in memory is, whatever the strategy keeps.
inline bool frees(const Options& options, bool mesh::Strategy::*lifetime) {
  return options.strategy.*lifetime || on_disk(options);
}

}  // namespace tesserae::shard
