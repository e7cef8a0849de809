#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/mesh/layout.h"

namespace tesserae::mesh {

/// A strategy is a value: three degrees and the lifetime of gathered parameters.
struct Strategy {
  Degrees degrees;                  ///< over how many ranks parameters, gradients and optimizer state are sharded
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

/// What a configuration or a script asks for.
struct StrategyRequest {
  std::string name;                ///< of a preset; empty: FULL_SHARD
  int hybrid_shard_degree = 0;     ///< 0: none
  std::optional<Degrees> degrees;  ///< stronger than both
};

/// The strategy that a request comes to for so many ranks: its three degrees, with the lifetimes of the named preset;
/// else its hybrid_shard_degree, as the degree of a preset that takes one and in the place of any other; else the
/// preset. Throws InvalidArgument as those do.
Strategy resolve(const StrategyRequest& request, int ranks);

/// The strategy after a change of degrees. What was never freed, because P was 1 (NO_SHARD, ZERO_1, ZERO_2), is freed
/// once P is more: else a change from NO_SHARD would save no memory.
Strategy with_degrees(Strategy strategy, const Degrees& degrees);

/// The one of FSDP's names that comes closest, for those who read it: NO_SHARD, SHARD_GRAD_OP, FULL_SHARD,
/// HYBRID_SHARD or HYBRID_SHARD_ZERO2.
std::string closest_preset(const Strategy& strategy, int ranks);

/// The names that `preset` takes.
std::vector<std::string> preset_names();
/// Whether the preset of that name reads `degree`. False for an unknown name.
bool takes_degree(std::string_view name);

}  // namespace tesserae::mesh
