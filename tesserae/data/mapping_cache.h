#pragma once

#include <cstddef>
#include <list>
#include <unordered_map>
#include <utility>

#include "tesserae/os/files.h"

namespace tesserae::data {

/// Keeps the files that were used last mapped: a process may have tens of thousands of mappings, a data set more files.
class MappingCache {
 public:
  explicit MappingCache(size_t capacity = 4096) : capacity_(capacity) {}

  /// The mapping of `path`, which the caller calls `file`. Valid until the next call.
  const os::Mapping& get(size_t file, const os::Path& path);

 private:
  using Recent = std::list<std::pair<size_t, os::Mapping>>;

  size_t capacity_;
  Recent recent_;  // the last one used first
  std::unordered_map<size_t, Recent::iterator> where_;
};

}  // namespace tesserae::data
