#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tesserae/mesh/layout.h"

namespace tesserae::mesh {

/// A strategy is a value: three degrees and the lifetime of gathered parameters.
struct Strategy {
  Degrees degrees;
  bool free_after_forward = true;   ///< parameters are gathered again for backward
  bool free_after_backward = true;  ///< false: kept until the optimizer step makes them stale

  bool operator==(const Strategy&) const = default;
};

/// The strategy of that name for `ranks` ranks. Names: NO_SHARD, ZERO_1, ZERO_2, SHARD_GRAD_OP, FULL_SHARD,
/// HYBRID_SHARD, HYBRID_SHARD_ZERO2, ZERO_PP (ZeRO++ hpZ). `degree` is read by the last three only. Throws
/// InvalidArgument for an unknown name (naming the nearest) and for a degree that does not divide `ranks`.
Strategy preset(std::string_view name, int ranks, int degree = 0);

/// SMP v2's dial: 1 is NO_SHARD, d >= 2 is HYBRID_SHARD of degree d (d == ranks: FULL_SHARD).
Strategy from_hybrid_shard_degree(int degree, int ranks);

/// The names that `preset` takes.
std::vector<std::string> preset_names();

}  // namespace tesserae::mesh
