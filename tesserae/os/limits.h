#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tesserae::os {

/// What the system grants this process (its soft limits); UINT64_MAX: as much as there is.
struct Limits {
  uint64_t open_files = 0;
  uint64_t locked_bytes = 0;  ///< of memory that may not be paged out: pinned buffers, RDMA
};
Limits limits();

/// The file system at `path`, in bytes. Throws IoError.
struct Space {
  uint64_t total = 0;
  uint64_t available = 0;
};
Space space_at(const std::string& path);

/// "Linux", "6.1.0-13-amd64", "x86_64".
struct System {
  std::string name, release, machine;
};
System system();

/// Whether the clock of the day is kept right by others (NTP, PTP); nothing where the system does not say.
std::optional<bool> clock_is_synchronised();

/// Seconds since 1970, as this host's clock has it.
double time_of_day();

}  // namespace tesserae::os
