#pragma once

#include <cstddef>
#include <cstring>

namespace tesserae {

/// std::memcpy, whose pointers must not be null even where there is nothing to copy: an empty tensor's and text's are.
inline void copy_memory(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace tesserae
