#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/checkpoint/manifest.h"
#include "tesserae/mesh/transfer.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// Elements of a stored tensor that someone wants.
struct Wanted {
  std::string_view tensor;
  mesh::Range elements;
  /// Where they go, element `elements.begin` first, in the stored dtype; nullptr: they are handed to `take`.
  char* destination = nullptr;
  /// Called with each verified run, in no particular order; `first`: the element with which it begins. The bytes are
  /// whole elements and valid during the call.
  std::function<void(int64_t first, std::string_view bytes)> take = {};
};

/// A committed checkpoint, open for reading. Immutable; may be used from several threads.
class Checkpoint {
 public:
  /// Reads the manifest. Throws Damaged if it is missing or not what was written, IoError if it cannot be read,
  /// InvalidArgument if `path` is no directory or was written by a newer version.
  static Checkpoint open(const os::Path& path);

  const os::Path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  int64_t step() const { return manifest_.step; }

  /// Reads what is wanted, each block of each file once, and checks every block before any of its bytes are handed out;
  /// of each file that is touched, the header too.
  /// Memory: one block. Throws Damaged naming file, tensor and offset, InvalidArgument for a tensor or elements that
  /// the checkpoint does not have, IoError. After it threw, destinations hold anything.
  void read(const std::vector<Wanted>& wanted) const;

  /// All of one tensor, in the stored dtype.
  std::string read(std::string_view tensor) const;

 private:
  Checkpoint(os::Path path, Manifest manifest);

  os::Path path_;
  Manifest manifest_;
  std::vector<uint64_t> data_begin_;  // of each file: where its first part begins
};

}  // namespace tesserae::checkpoint
