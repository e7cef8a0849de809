#include "tesserae/os/write_all.h"

#include <unistd.h>

#include <cerrno>

#include "tesserae/os/failure.h"

namespace tesserae::os {

void write_all(int descriptor, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::write(descriptor, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno != EINTR) throw failure("write_all", cat("descriptor ", descriptor), "cannot write");
    done += count < 0 ? 0 : static_cast<size_t>(count);
  }
}

}  // namespace tesserae::os
