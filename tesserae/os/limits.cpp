#include "tesserae/os/limits.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/utsname.h>

#include <chrono>

#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

template <class Resource>
uint64_t soft_limit(Resource resource) {
  struct rlimit limit {};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

}  // namespace

Limits limits() {
  return {.open_files = soft_limit(RLIMIT_NOFILE), .locked_bytes = soft_limit(RLIMIT_MEMLOCK)};
}

Space space_at(const std::string& path) {
  struct statvfs found {};
  if (::statvfs(path.c_str(), &found) != 0) throw failure("space_at", path, "cannot ask for its size");
  return {.total = uint64_t{found.f_blocks} * found.f_frsize, .available = uint64_t{found.f_bavail} * found.f_frsize};
}

System system() {
  struct utsname found {};
  if (::uname(&found) != 0) return {};
  return {.name = found.sysname, .release = found.release, .machine = found.machine};
}

std::optional<bool> clock_is_synchronised() {
  struct timex state {};
  const int answer = ::adjtimex(&state);
  if (answer < 0) return std::nullopt;
  return answer != TIME_ERROR;
}

double time_of_day() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace tesserae::os
