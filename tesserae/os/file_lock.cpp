#include "tesserae/os/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include "tesserae/os/failure.h"

namespace tesserae::os {

std::optional<FileLock> FileLock::try_lock(const Path& path) {
  constexpr std::string_view function = "FileLock::try_lock";
  int number;
  do {  // a signal may interrupt it on a file system of a network
    number = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  } while (number < 0 && errno == EINTR);
  Descriptor file(number);
  if (!file) throw failure(function, path.native(), "cannot open");
  // Of the open file, not of the process as F_SETLK's are: two objects of one process exclude each other, and closing
  // another descriptor of the file gives nothing back.
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (::fcntl(file.get(), F_OFD_SETLK, &lock) == 0) return FileLock(std::move(file));
  if (errno == EAGAIN || errno == EACCES) return std::nullopt;
  throw failure(function, path.native(), "cannot be locked");
}

}  // namespace tesserae::os
