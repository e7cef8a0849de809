#include "tesserae/offload/memory_limit.h"

#include <algorithm>
#include <utility>

#include "tesserae/os/memory.h"

namespace tesserae::offload {

MemoryLimit::MemoryLimit(std::shared_ptr<Disk> disk, std::optional<int64_t> bytes)
    : disk_(std::move(disk)), bytes_(bytes) {
  if (!bytes_ && disk_ != nullptr) disk_->set_memory(without_limit);
}

bool MemoryLimit::after_step(int64_t peak) {
  if (!bytes_) return false;
  const int64_t margin = *bytes_ / 32;  // page tables, and what a step has by chance
  if (disk_ != nullptr) give_out(*bytes_ - margin - peak);
  return peak > *bytes_ && !std::exchange(told_, true);
}

void MemoryLimit::give_out(int64_t unused) {
  int64_t memory = disk_->memory();
  if (unused < 0) {
    memory = ceiling_ = std::max(memory + unused, at_first);
  } else if (!std::exchange(grew_, !grew_)) {
    memory = std::min({memory + unused / 4 * 3, ceiling_, disk_->counters().size + without_limit});
  }
  disk_->set_memory(memory);
}

std::optional<int64_t> memory_of_rank(std::optional<int64_t> configured, int ranks_here) {
  if (configured) return *configured / ranks_here;
  // It is of all that runs in the group, and ends whoever goes beyond it: a part is left for the others.
  const std::optional<int64_t> group = os::group_memory_limit();
  return group ? std::optional(*group / 4 * 3 / ranks_here) : std::nullopt;
}

}  // namespace tesserae::offload
