#pragma once

#include <cstdint>

#include "tesserae/mesh/layout.h"

namespace tesserae::shard {

/// What a change of degrees did on this rank.
struct Resharding {
  mesh::Degrees from, to;
  double seconds = 0;  ///< until the model could train again
  uint64_t bytes = 0;  ///< that this rank sent: exactly what others lacked and had to get from it
};

}  // namespace tesserae::shard
