#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "tesserae/os/disk_queue.h"
#include "tesserae/os/scratch_file.h"

namespace tesserae::offload {

struct DiskOptions {
  os::Path folder;             ///< of the scratch file; on a local disk
  int64_t memory = 128 << 20;  ///< bytes of what lies there that may be in memory at a time; see Disk::set_memory
  os::DiskQueue::Engine engine = os::DiskQueue::Engine::best;
  bool keeps = true;  ///< what there is memory for stays in it between uses; see [Note: what stays]
};

/// What a disk has done so far, in bytes and seconds.
struct DiskCounters {
  uint64_t read = 0, written = 0;
  double waited = 0;          ///< threads that needed what was not there yet, or room
  int64_t size = 0;           ///< taken on the disk
  int64_t writing = 0;        ///< blocks on their way out
  int64_t resident = 0;       ///< in memory now
  int64_t most_resident = 0;  ///< at any time
};

/// The scratch file of a rank and the memory through which its blocks come and go: what all paged tensors of the rank
/// share. Kept by them. Thread-safe.
///
/// [Note: what stays] Training goes over the same blocks in the same order, step after step, so the block that was used
/// last is the one that is needed last: a block leaves when its use ends, unless there is memory for it beside a window
/// for what is on its way. So with memory for all of it nothing travels, and with memory for half of it half does.
class Disk {
 public:
  /// The least memory with which a step makes progress worth the name: for what comes and goes.
  static constexpr int64_t least_memory = int64_t{48} << 20;

  /// Throws IoError.
  explicit Disk(const DiskOptions& options);
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  /// How much may be in memory from now on. Blocks in use count and are never refused: what one call of update() or a
  /// change of degrees needs at a time may be more than that.
  void set_memory(int64_t bytes);
  int64_t memory() const;
  /// Room for `bytes` of paged memory that will be made, taken from the disk now. Throws IoError.
  void reserve(uint64_t bytes);
  DiskCounters counters() const;
  /// The first block that could not be read or written: from then on every use of paged memory throws it.
  std::exception_ptr failure() const;
  /// "io_uring past the page cache in /scratch".
  std::string describe() const;

 private:
  friend class PagedMemory;

  int64_t window() const;
  bool has_room(int64_t bytes) const { return resident_ + bytes <= memory_; }
  void count_resident(int64_t change);
  uint64_t take(uint64_t bytes);
  void give_back(uint64_t offset, uint64_t bytes);

  os::ScratchFile file_;
  mutable std::mutex mutex_;  // of all that follows, and of all paged memory
  std::condition_variable changed_;
  const bool keeps_;
  int64_t memory_;
  int64_t resident_ = 0, most_resident_ = 0;
  int64_t staying_ = 0;  // of blocks that stay between their uses
  int64_t writing_ = 0;  // blocks on their way out
  uint64_t read_ = 0, written_ = 0;
  double waited_ = 0;
  std::exception_ptr failure_;
  std::map<uint64_t, uint64_t> free_;     // offset, bytes
  std::unique_ptr<os::DiskQueue> queue_;  // last: its threads end before what they use does
};

}  // namespace tesserae::offload
