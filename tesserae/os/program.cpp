#include "tesserae/os/program.h"

#include <unistd.h>

#include "tesserae/os/failure.h"

namespace tesserae::os {

std::string program_path() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length < 0) throw failure("program_path", "/proc/self/exe", "cannot read the link");
  path.resize(static_cast<size_t>(length));
  return path;
}

}  // namespace tesserae::os
