#include "tesserae/os/memory.h"

#include <fcntl.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/os/control_groups.h"
#include "tesserae/os/descriptor.h"
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

/// A control group (v1 or v2) that limits the memory of this process.
struct LimitingGroup {
  uint64_t limit;
  uint64_t used;  ///< of it, without pages of files, which are given up for whoever needs memory
};

uint64_t used_by(const ControlGroup& group) {
  const auto all =
      static_cast<uint64_t>(group.number(group.second ? "memory.current" : "memory.usage_in_bytes").value_or(0));
  if (!files().exists(group.folder / "memory.stat")) return all;
  const std::string text = cat("\n", files().read(group.folder / "memory.stat"));
  uint64_t of_files = 0;
  for (const std::string_view name : {"active_file", "inactive_file"}) {
    const std::string key = cat("\n", group.second ? "" : "total_", name, " ");
    if (const size_t at = text.find(key); at != std::string::npos) {
      of_files += number(std::string_view(text).substr(at + key.size())).value_or(0);
    }
  }
  return all - std::min(all, of_files);
}

/// The group that this process is in, and those around it, as far as they limit it.
std::vector<LimitingGroup> limiting_groups() {
  constexpr uint64_t none = uint64_t{1} << 60;  // v1 has no word for it
  std::vector<LimitingGroup> found;
  for (const ControlGroup& group : control_groups("memory")) {
    const auto limit = group.number(group.second ? "memory.max" : "memory.limit_in_bytes");
    if (limit && static_cast<uint64_t>(*limit) < none) found.push_back({static_cast<uint64_t>(*limit), used_by(group)});
  }
  return found;
}

/// The highest peak that recent_memory() made the system forget.
std::atomic<uint64_t> forgotten_peak{0};

}  // namespace

ProcessMemory process_memory(pid_t process) {
  constexpr std::string_view function = "process_memory";
  const Path folder = process == 0 ? Path("/proc/self") : Path("/proc") / std::to_string(process);
  const std::string rollup = files().read(folder / "smaps_rollup");
  const std::string status = files().read(folder / "status");
  const uint64_t peak = kilobytes(function, folder / "status", status, "VmHWM");
  const bool own = process == 0 || process == ::getpid();
  return {.resident = kilobytes(function, folder / "smaps_rollup", rollup, "Rss"),
          .proportional = kilobytes(function, folder / "smaps_rollup", rollup, "Pss"),
          .peak_resident = own ? std::max(peak, forgotten_peak.load()) : peak,
          .of_files = kilobytes(function, folder / "smaps_rollup", rollup, "Pss_File")};
}

uint64_t peak_resident() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::max(static_cast<uint64_t>(usage.ru_maxrss) * 1024, forgotten_peak.load());
}

uint64_t major_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_majflt);
}

RecentMemory recent_memory() {
  constexpr std::string_view function = "recent_memory";
  const Path path = "/proc/self/status";
  const std::string status = files().read(path);
  const RecentMemory memory{.resident = kilobytes(function, path, status, "VmRSS"),
                            .peak = kilobytes(function, path, status, "VmHWM")};
  uint64_t before = forgotten_peak;
  while (before < memory.peak && !forgotten_peak.compare_exchange_weak(before, memory.peak)) {
  }
  // 5: the peak is what is resident now (proc(5)). A failure is harmless, see the header.
  const Descriptor file(::open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC));
  [[maybe_unused]] const ssize_t written = file ? ::write(file.get(), "5", 1) : -1;
  return memory;
}

void give_back_freed_memory() {
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)  // whose malloc leaves glibc's without an arena to trim
  ::malloc_trim(0);
#endif
}

void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* const theirs : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(theirs) != nullptr) return;
  }
  constexpr int largest_mmap_threshold = 32 << 20;  // mallopt(3) refuses more
  ::mallopt(M_MMAP_THRESHOLD, largest_mmap_threshold);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

std::optional<int64_t> group_memory_limit() {
  const std::vector<LimitingGroup> groups = limiting_groups();
  if (groups.empty()) return std::nullopt;
  return static_cast<int64_t>(std::ranges::min(groups, {}, &LimitingGroup::limit).limit);
}

HostMemory host_memory() {
  const Path path = "/proc/meminfo";
  const std::string text = files().read(path);
  HostMemory memory{.total = kilobytes("host_memory", path, text, "MemTotal"),
                    .available = kilobytes("host_memory", path, text, "MemAvailable")};
  for (const LimitingGroup& group : limiting_groups()) {
    memory.total = std::min(memory.total, group.limit);
    memory.available = std::min(memory.available, group.limit - std::min(group.limit, group.used));
  }
  return memory;
}

}  // namespace tesserae::os
