#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/scratch_file.h"

namespace tesserae::os {

/// What was read of a scratch file is not what was written there.
class DamagedBlock : public IoError {
 public:
  using IoError::IoError;
};

/// One transfer between memory and a scratch file; see ScratchFile for what must be aligned.
struct BlockRequest {
  enum class Direction { read, write };
  Direction direction = Direction::read;
  uint64_t offset = 0;
  char* memory = nullptr;
  size_t bytes = 0;
  uint64_t* checksum = nullptr;  ///< a write leaves its own there, a read must find it again: else DamagedBlock
  std::function<void(const std::exception_ptr& failure)> done = {};  ///< on a thread of the queue; throws nothing
};

/// Transfers of whole blocks that run beside their callers, several at a time, in no order: whoever needs one after
/// another waits. By io_uring, or by threads where the system forbids that. Thread-safe.
class DiskQueue {
 public:
  enum class Engine { best, threads };

  /// `file` outlives it.
  static std::unique_ptr<DiskQueue> make(const ScratchFile& file, Engine engine = Engine::best);
  /// Returns when all requests are done.
  virtual ~DiskQueue() = default;

  virtual void submit(BlockRequest request) = 0;
  virtual std::string engine() const = 0;  ///< "io_uring" or "threads"
};

}  // namespace tesserae::os
