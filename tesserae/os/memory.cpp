#include "tesserae/os/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/os/files.h"

namespace tesserae::os {
namespace {

std::optional<uint64_t> number(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(" \t"), text.size());
  uint64_t value = 0;
  const auto parsed = std::from_chars(text.data() + begin, text.data() + text.size(), value);
  return parsed.ec == std::errc() ? std::optional(value) : std::nullopt;
}

/// The value of the line "Name:  123 kB" of a file of /proc, in bytes.
uint64_t kilobytes(std::string_view function, const Path& path, std::string_view text, std::string_view name) {
  const std::string key = cat("\n", name, ":");
  const size_t at = text.starts_with(std::string_view(key).substr(1)) ? 0 : text.find(key);
  if (at != std::string_view::npos) {
    if (const auto value = number(text.substr(text.find(':', at) + 1))) return *value * 1024;
  }
  throw IoError(function, cat(path.native(), ": has no line '", name, "'"));
}

/// The number in a file of a control group; nothing if there is no such file or it says "max".
std::optional<uint64_t> group_limit(const Path& path) {
  if (!files().exists(path)) return std::nullopt;
  return number(files().read(path));
}

}  // namespace

ProcessMemory process_memory(pid_t process) {
  constexpr std::string_view function = "process_memory";
  const Path folder = process == 0 ? Path("/proc/self") : Path("/proc") / std::to_string(process);
  const std::string rollup = files().read(folder / "smaps_rollup");
  const std::string status = files().read(folder / "status");
  return {.resident = kilobytes(function, folder / "smaps_rollup", rollup, "Rss"),
          .proportional = kilobytes(function, folder / "smaps_rollup", rollup, "Pss"),
          .peak_resident = kilobytes(function, folder / "status", status, "VmHWM")};
}

uint64_t peak_resident() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

HostMemory host_memory() {
  const Path path = "/proc/meminfo";
  const std::string text = files().read(path);
  HostMemory memory{.total = kilobytes("host_memory", path, text, "MemTotal"),
                    .available = kilobytes("host_memory", path, text, "MemAvailable")};
  // Inside a container this is the container's own group; on a bare host the root group, which has no such file.
  const auto limit = group_limit("/sys/fs/cgroup/memory.max");
  const auto used = group_limit("/sys/fs/cgroup/memory.current");
  if (limit && *limit < memory.total) {
    memory.total = *limit;
    if (used) memory.available = std::min(memory.available, *limit - std::min(*limit, *used));
  }
  return memory;
}

}  // namespace tesserae::os
