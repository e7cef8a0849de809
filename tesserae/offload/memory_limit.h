#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "tesserae/offload/disk.h"

namespace tesserae::offload {

/// Keeps a rank within its part of a host's memory: what the rest of the process leaves of that is for state that lies
/// on the disk to stay in. How much that is, is not foretold but approached: the first step runs with little, and what
/// a step did not use is given out for the most part, every second step, since what stays builds up over a whole one. A
/// step that needed too much takes its excess back for good: evaluations and saves come again.
///
/// Used from the training thread.
class MemoryLimit {
 public:
  /// Bytes of such state in memory before a step was seen.
  static constexpr int64_t at_first = Disk::least_memory;
  /// Where there is no limit.
  static constexpr int64_t without_limit = int64_t{256} << 20;

  /// `disk`: null where no state lies on one; then all that is left is to say so. `bytes`: of this rank; nothing: no
  /// limit.
  MemoryLimit(std::shared_ptr<Disk> disk, std::optional<int64_t> bytes);

  /// A step has ended in which the process had up to `peak` bytes in memory. True once, the first time that this was
  /// more than the limit.
  bool after_step(int64_t peak);
  const std::optional<int64_t>& bytes() const { return bytes_; }

 private:
  void give_out(int64_t unused);

  std::shared_ptr<Disk> disk_;
  std::optional<int64_t> bytes_;
  int64_t ceiling_ = std::numeric_limits<int64_t>::max();  // of what is given out
  bool grew_ = false;                                      // before the last step
  bool told_ = false;
};

/// Of a rank, of a host's ranks: of `configured`, else of three quarters of the control group's limit.
std::optional<int64_t> memory_of_rank(std::optional<int64_t> configured, int ranks_here);

}  // namespace tesserae::offload
