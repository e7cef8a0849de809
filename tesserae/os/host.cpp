#include "tesserae/os/host.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "tesserae/base/error.h"
#include "tesserae/os/control_groups.h"
#include "tesserae/os/files.h"

namespace tesserae::os {

std::string host_name() {
  utsname names{};
  ::uname(&names);
  return names.nodename;
}

std::string host_identity() {
  const Path boot = "/proc/sys/kernel/random/boot_id";
  if (!files().exists(boot)) return host_name();
  std::string identity = cat(host_name(), "/", files().read(boot));
  identity.erase(identity.find_last_not_of('\n') + 1);
  std::error_code hidden;
  return cat(identity, "/", std::filesystem::read_symlink("/proc/self/ns/pid", hidden).native());
}

int processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  int count = known ? CPU_COUNT(&allowed) : static_cast<int>(std::thread::hardware_concurrency());
  for (const ControlGroup& group : control_groups("cpu")) {
    if (const auto quota = processor_quota(group)) count = std::min(count, static_cast<int>(std::ceil(*quota)));
  }
  return std::max(1, count);
}

}  // namespace tesserae::os
