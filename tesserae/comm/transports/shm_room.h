#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tesserae/os/memory_file.h"

namespace tesserae::comm {

/// What members must agree on; travels with every block of data.
struct ShmLabel {
  uint64_t sequence = 0;
  uint32_t verb = 0;
  int32_t root = -1;
  int64_t elements = 0;
  int32_t dtype = -1;
  uint16_t reduction = 0;
  uint16_t text_bytes = 0;  ///< a barrier's data are words; `elements` is their hash
  uint32_t contents = 0;    ///< Label::contents
  bool operator==(const ShmLabel&) const = default;
};

/// The memory that the members of one group share on a host, and how they wait for each other in it.
///
/// [Note: shm] All data go through rings of blocks: one ring for each member, read by all others (collectives), and one
/// for each pair (messages). A block's life:
///  1. its writer waits until every reader has counted what was in it before;
///  2. it writes label and data, then counts the block as written, and rings the readers' bells;
///  3. a reader that waits for the count checks the label, uses the data in place, counts the block as read, and rings
///     the writer's bell.
/// Counts only grow and each has one writer, so nothing is ever reset and no lock is needed. Who finds nothing to do
/// spins for a few microseconds, then sleeps on its own bell.
class ShmRoom {
 public:
  struct Shape {
    int members = 0;
    size_t ring_bytes = 0;  ///< of a block of a member's ring
    size_t mail_bytes = 0;  ///< of a block of a pair's ring
    size_t total() const;
  };
  static constexpr uint64_t ring_blocks = 4;
  static constexpr uint64_t mail_blocks = 2;

  ShmRoom(os::MemoryFile memory, Shape shape, int member);

  struct Block {
    ShmLabel* label;
    std::byte* data;
  };
  using Count = std::atomic<uint64_t>;

  Block ring_block(int writer, uint64_t index) const;
  Block mail_block(int from, int to, uint64_t index) const;
  Count& written(int writer) const;
  Count& read(int writer, int reader) const;
  Count& mail_written(int from, int to) const;
  Count& mail_read(int from, int to) const;

  /// Waits until `ready()`. `check()` is called now and then, and throws if there is no use in waiting.
  template <class Ready, class Check>
  void wait(const Ready& ready, const Check& check) const {
    for (int spin = 0; spin < spins; ++spin) {
      if (ready()) return;
      pause();
    }
    while (!sleep_unless(ready)) check();
  }
  void ring_bell(int member) const;
  void ring_all() const;

  const Shape& shape() const { return shape_; }
  os::MemoryFile& memory() { return memory_; }

 private:
  static constexpr int spins = 200;
  struct alignas(64) Bell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleepers;
  };
  struct alignas(64) Counter {
    Count value;
  };

  static void pause();
  void sleep(uint32_t seen) const;
  Bell& bell(int member) const;
  Counter& counter(size_t index) const;

  // True if `ready()`. Else sleeps, at most for a moment.
  template <class Ready>
  bool sleep_unless(const Ready& ready) const {
    Bell& own = bell(member_);
    own.sleepers.fetch_add(1);
    const uint32_t seen = own.rings.load();
    const bool done = ready();
    if (!done) sleep(seen);
    own.sleepers.fetch_sub(1);
    return done;
  }

  os::MemoryFile memory_;
  Shape shape_;
  int member_;
};

}  // namespace tesserae::comm
