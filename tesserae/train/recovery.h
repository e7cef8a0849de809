#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tesserae/mesh/strategy.h"
#include "tesserae/offload/tier.h"
#include "tesserae/train/run.h"

namespace tesserae::train {

// What all ranks of a run know, and those that come later from the launcher (Run::remember).
inline constexpr const char *run_key = "run", *strategy_key = "strategy";  // its folder; how its state is sharded

/// What would let a job survive the loss of what a rank alone holds.
inline constexpr const char* how_to_keep_it =
    "lower hybrid_shard_degree so that there are replicas, or set checkpoint.memory_every_steps or "
    "checkpoint.every_steps";

// What ranks tell a new one of how the state is sharded: degrees, lifetimes, tiers, and why these were chosen.
nlohmann::json strategy_json(const mesh::Strategy& strategy, const offload::Tiers& tiers, const std::string& choice);
mesh::Strategy strategy_from(const nlohmann::json& told, mesh::Strategy strategy);

/// Who has what when ranks meet after a loss. The same on all of them.
struct Run::Standing {
  std::vector<bool> whole;  ///< by rank
  std::vector<int> new_ones;
  int reference = -1;        ///< the lowest whole rank of the latest step; -1: nobody has a state
  std::string run;           ///< where the run writes; empty: nobody has chosen that yet
  bool begun = false;        ///< all have had the state with which it begins
  int64_t step = 0;          ///< of the reference
  int64_t origin = 0;        ///< with which its state began
  bool pending = false;      ///< that step is not finished on all that count it, or something of it was undone
  bool save_broken = false;  ///< a save has been given up
};

}  // namespace tesserae::train
