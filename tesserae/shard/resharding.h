#pragma once

#include <cstdint>

#include "tesserae/shard/setting.h"

namespace tesserae::shard {

/// What a turn of the dial did on this rank.
struct Resharding {
  Setting from, to;    ///< degrees and tiers, before and after
  double seconds = 0;  ///< until the model could train again
  uint64_t bytes = 0;  ///< that this rank sent: exactly what others lacked and had to get from it
};

}  // namespace tesserae::shard
