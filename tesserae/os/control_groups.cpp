#include "tesserae/os/control_groups.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string>

namespace tesserae::os {
namespace {

std::optional<int64_t> number_at(std::string_view text, size_t begin) {
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data() + std::min(begin, text.size()), text.data() + text.size(), value);
  return parsed.ec == std::errc() ? std::optional(value) : std::nullopt;
}

/// Whether `controllers`, as "cpu,cpuacct", has `name`.
bool has(const std::string& controllers, std::string_view name) {
  std::istringstream words(controllers);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == name) return true;
  }
  return false;
}

}  // namespace

std::optional<int64_t> ControlGroup::number(std::string_view file) const {
  const Path path = folder / file;
  if (!files().exists(path)) return std::nullopt;
  return number_at(files().read(path), 0);
}

std::vector<ControlGroup> control_groups(std::string_view controller) {
  const Path own = "/proc/self/cgroup", all = "/sys/fs/cgroup";
  std::vector<ControlGroup> found;
  if (!files().exists(own)) return found;
  std::istringstream lines(files().read(own));
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" (v2) or "4:memory:/a/b" (v1).
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !has(controllers, controller)) continue;
    const Path root = controllers.empty() ? all : all / controller;
    for (Path group = Path(line.substr(second + 1)).relative_path();; group = group.parent_path()) {
      found.push_back({root / group, controllers.empty()});
      if (group.empty()) break;
    }
  }
  return found;
}

std::optional<double> processor_quota(const ControlGroup& group) {
  std::optional<int64_t> quota, period;
  if (!group.second) {
    quota = group.number("cpu.cfs_quota_us");
    period = group.number("cpu.cfs_period_us");
  } else if (files().exists(group.folder / "cpu.max")) {
    const std::string text = files().read(group.folder / "cpu.max");  // "150000 100000", or "max 100000"
    quota = number_at(text, 0);
    period = number_at(text, text.find(' ') + 1);
  }
  if (quota.value_or(0) <= 0 || period.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

}  // namespace tesserae::os
