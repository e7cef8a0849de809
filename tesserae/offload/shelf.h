#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tesserae/os/files.h"

namespace tesserae::offload {

/// Bytes of one storage that were put on a shelf. They come back as often as they are asked for, and are given up when
/// the last owner goes; a storage that take() has returned may live longer.
class Shelved {
 public:
  virtual ~Shelved() = default;
  /// Starts to bring them back. Never waits; again does nothing.
  virtual void load() = 0;
  /// A storage of the same device with the same bytes, to be read only. On a host it waits for them; on an accelerator
  /// the current stream does.
  virtual c10::Storage take() = 0;
};

/// Where the bytes of activations lie between forward and backward: a disk for what is computed on the host, pinned
/// host memory for what is computed on an accelerator. Memory is used again, step after step. Used by one thread at a
/// time; what was put may outlive the shelf.
class Shelf {
 public:
  virtual ~Shelf() = default;
  /// Takes room for so many bytes now, where it is scarce. Throws IoError.
  virtual void reserve(int64_t bytes) = 0;
  /// Whoever holds the storage may let go of it afterwards, and must not have changed it before it does.
  virtual std::shared_ptr<Shelved> put(const c10::Storage& storage) = 0;
  /// The unit that put what was put last is over: memory of what was put before it is free from here on.
  virtual void end_unit() = 0;
  /// A unit's backward begins, whose bytes are asked for next.
  virtual void begin_backward() = 0;
  /// A forward and its backward are over, in which `window` bytes were the most that came back together.
  virtual void end_pass(int64_t window) = 0;
  virtual std::string describe() const = 0;  ///< "disk (io_uring past the page cache in /scratch)"
};

/// For storages of `device`. `folder`: of the scratch file, on a local disk; read only for the host. Throws IoError.
std::shared_ptr<Shelf> make_shelf(c10::Device device, const os::Path& folder);

}  // namespace tesserae::offload
