#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "tesserae/os/files.h"

namespace tesserae::data {

/// Keeps the files that were used last open: a data set may have more files than a process may have open. Read, not
/// mapped: a file that is truncated while it is mapped ends the process with SIGBUS, and nobody says which one it was.
class OpenFiles {
 public:
  /// A usual limit is 1,024 descriptors a process.
  explicit OpenFiles(size_t capacity = 256) : capacity_(capacity) {}

  /// The file at `path`, which the caller calls `file`. Valid until the next call. Throws IoError.
  os::ReadableFile& get(size_t file, const os::Path& path);
  bool has(size_t file) const { return where_.contains(file); }

 private:
  using Recent = std::list<std::pair<size_t, std::unique_ptr<os::ReadableFile>>>;

  size_t capacity_;
  Recent recent_;  // the last one used first
  std::unordered_map<size_t, Recent::iterator> where_;
};

}  // namespace tesserae::data
