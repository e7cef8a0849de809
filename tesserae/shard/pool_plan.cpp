#include "tesserae/shard/pool_plan.h"

#include <algorithm>

namespace tesserae::shard {
namespace {

// How many units with parameters lie one inside the other at most, the root apart: a step works with so many at once.
int nesting(const std::vector<UnitNeeds>& units) {
  std::vector<int> depths;
  int most = 1;
  for (size_t i = 1; i < units.size(); ++i) {
    int depth = 0;
    for (size_t k = 1; k < i; ++k) {  // parents come first
      if (units[i].name.starts_with(units[k].name + ".")) depth = std::max(depth, depths[k - 1]);
    }
    depths.push_back(depth + (units[i].buffers.empty() ? 0 : 1));
    most = std::max(most, depths.back());
  }
  return most;
}

}  // namespace

std::vector<PoolPart> plan_pool(const std::vector<UnitNeeds>& units, int limit_all_gathers, int limit_reductions) {
  std::vector<PoolPart> parts;
  std::vector<int64_t> gather_bytes, reduce_bytes;
  const auto raise = [](std::vector<int64_t>& largest, size_t position, int64_t bytes) {
    if (largest.size() <= position) largest.resize(position + 1, 0);
    largest[position] = std::max(largest[position], bytes);
  };
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const bool is_root = unit == 0;
    const auto& buffers = units[unit].buffers;
    for (size_t position = 0; position < buffers.size(); ++position) {
      const UnitNeeds::Buffer& buffer = buffers[position];
      if (buffer.gathered > 0 && (is_root || units[unit].stays_gathered)) {
        parts.push_back({buffer.gathered, 1, buffer.gatherer});
      } else if (buffer.gathered > 0) {
        raise(gather_bytes, position, buffer.gathered);
      }
      if (buffer.reduced > 0 && is_root) {
        parts.push_back({buffer.reduced, 1, buffer.reducer});
      } else if (buffer.reduced > 0) {
        raise(reduce_bytes, position, buffer.reduced);
      }
    }
  }
  const int inner_units = static_cast<int>(units.size()) - 1, nested = nesting(units);
  const int gathers = std::max(limit_all_gathers, nested),
            reductions = std::min(limit_reductions, inner_units) + nested - 1;
  for (const int64_t bytes : gather_bytes) parts.push_back({bytes, std::min(gathers, inner_units), nullptr});
  for (const int64_t bytes : reduce_bytes) parts.push_back({bytes, std::min(reductions, inner_units), nullptr});
  return parts;
}

}  // namespace tesserae::shard
