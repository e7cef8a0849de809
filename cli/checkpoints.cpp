#include "cli/checkpoints.h"

#include <array>
#include <cstdio>

#include "tesserae/base/error.h"

namespace tesserae::cli {

std::vector<os::Path> checkpoints_at(const os::Path& path) {
  if (checkpoint::means_one(path)) return {path};
  for (const os::Path& folder : {path, path / "checkpoints"}) {
    if (os::files().status(folder).kind != os::FileKind::directory) continue;
    std::vector<os::Path> found;
    for (const checkpoint::Committed& committed : checkpoint::list_checkpoints(folder)) found.push_back(committed.path);
    if (!found.empty()) return found;
  }
  throw InvalidArgument("checkpoints", cat(path.native(), " is no checkpoint, and there are none in it"));
}

std::string grouped(uint64_t number) {
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

std::string readable_bytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> units{"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text.data();
}

}  // namespace tesserae::cli
