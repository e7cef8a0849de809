#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tesserae::shard {

// What an engine reserves in its pool ([Note: pool] in pool.h): one arithmetic for setting up, and for a turn of the
// dial that must know beforehand whether there is room.

/// What one unit asks of the pool. The first unit of a list is the root.
struct UnitNeeds {
  /// One flat buffer's; 0 bytes: it never asks. Who asks are the owners of buffers that are for nobody else.
  struct Buffer {
    int64_t gathered = 0, reduced = 0;
    const void* gatherer = nullptr;
    const void* reducer = nullptr;
  };
  std::string name;
  bool stays_gathered = false;  ///< its forward does not free
  std::vector<Buffer> buffers;
};

/// `count` buffers of `bytes` each; owner null: for anybody.
struct PoolPart {
  int64_t bytes = 0;
  int count = 0;
  const void* owner = nullptr;
  bool operator==(const PoolPart&) const = default;
};

/// Units that are gathered one after the other share buffers; the root, and every unit that stays gathered, has its
/// own. Buffers are counted per position within the unit (most units have one flat buffer), with the size of the
/// largest. Where units lie inside others, the outer ones hold theirs meanwhile.
std::vector<PoolPart> plan_pool(const std::vector<UnitNeeds>& units, int limit_all_gathers, int limit_reductions);

}  // namespace tesserae::shard
