#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "tesserae/base/error.h"

namespace tesserae::doctor {

/// "1 rank", "4 ranks".
inline std::string counted(int64_t count, const char* thing) {
  return cat(count, " ", thing, count == 1 ? "" : "s");
}

/// "23.4 GiB", "64 MiB".
inline std::string in_gib(uint64_t bytes) {
  char text[32];
  if (bytes < (uint64_t{1} << 30)) {
    std::snprintf(text, sizeof text, "%.0f MiB", static_cast<double>(bytes) / (1 << 20));
  } else {
    std::snprintf(text, sizeof text, "%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  return text;
}

}  // namespace tesserae::doctor
