#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tesserae/offload/disk.h"

namespace tesserae::offload {

/// What a use of paged memory does with it.
enum class Access {
  read,     ///< leaves it as it is
  update,   ///< reads and changes it
  fill,     ///< overwrites it, whatever was there
  consume,  ///< reads and may change it, and nobody needs it afterwards: it then has the values of before or of after
};

/// A range of addresses whose blocks are in memory while they are used and else on a disk. The addresses stay for its
/// life; those of a block that is not in memory cannot be accessed at all: a use that was forgotten ends the process
/// instead of giving wrong numbers. Zeros at first, which take neither memory nor time. Thread-safe.
///
/// A block's life:
///  1. nowhere: zeros that nobody has touched;
///  2. reading: a use needs it, or prefetch() expects one and there is room;
///  3. memory: in use, or there is room for it to stay;
///  4. writing: its last use has ended, it was changed and cannot stay. Who reads it need not wait, who changes it
///  does;
///  5. disk: its memory has been given back.
class PagedMemory {
 public:
  static constexpr size_t block = size_t{2} << 20;

  /// What so many bytes take on a disk.
  static size_t on_disk(size_t bytes);

  /// Room on the disk is taken at once. Throws IoError.
  PagedMemory(std::shared_ptr<Disk> disk, size_t bytes);
  ~PagedMemory();
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::shared_ptr<Disk>& disk() const { return disk_; }

  /// The bytes [begin, end) can be accessed until release() of the same. Waits for them, and for room while others are
  /// on their way out. Throws what the disk failed with; then there is nothing to release.
  void acquire(size_t begin, size_t end, Access access);
  void release(size_t begin, size_t end, Access access) noexcept;
  /// Starts to read them as far as there is room. Never waits.
  void prefetch(size_t begin, size_t end);

 private:
  enum class Where : uint8_t { nowhere, reading, memory, writing, disk };
  struct Block {
    Where where = Where::nowhere;
    bool changed = false;  // since it was written
    bool stored = false;   // the disk has a version of it
    bool stays = false;    // between its uses, too; see [Note: what stays]
    int uses = 0;
    uint64_t checksum = 0;
  };

  size_t size_of(size_t index) const;
  void begin_read(size_t index);
  void begin_write(size_t index);
  void end_transfer(size_t index, const std::exception_ptr& failure);
  void begin_use(std::unique_lock<std::mutex>& lock, size_t index, bool whole);
  void end_use(size_t index);
  void admit(size_t index);
  void settle(size_t index);
  void choose_whether_it_stays(size_t index);
  void drop(size_t index);

  std::shared_ptr<Disk> disk_;
  size_t bytes_, mapped_;
  char* data_;
  uint64_t offset_;  // in the scratch file
  int travelling_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace tesserae::offload
