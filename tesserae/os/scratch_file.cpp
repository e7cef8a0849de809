#include "tesserae/os/scratch_file.h"

#include <fcntl.h>
#include <unistd.h>

#include "tesserae/os/failure.h"
#include "tesserae/os/limits.h"

namespace tesserae::os {
namespace {

constexpr const char* name = "ScratchFile";

// Without a name from the first moment where the file system knows how; else its name goes at once.
Descriptor open_without_name(const Path& folder) {
  int number;
  do {
    number = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  } while (number < 0 && errno == EINTR);
  Descriptor file(number);
  if (file || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  std::string path = (folder / "tesserae-scratch-XXXXXX").native();
  file = Descriptor(::mkostemp(path.data(), O_CLOEXEC));
  if (file) ::unlink(path.c_str());
  return file;
}

template <class Call>
void all_of(const Path& folder, const char* what, uint64_t offset, size_t bytes, const Call& call) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = call(done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) throw failure(name, cat("scratch file in ", folder.native()), what);
    if (moved == 0) throw failure(name, cat("scratch file in ", folder.native()), what, EIO);
    done += static_cast<size_t>(moved);
  }
}

}  // namespace

ScratchFile::ScratchFile(const Path& folder) : folder_(folder) {
  files().make_directories(folder);
  file_ = open_without_name(folder);
  if (!file_) throw failure(name, folder.native(), "cannot make a scratch file here");
  direct_ = ::fcntl(file_.get(), F_SETFL, O_DIRECT) == 0;
}

uint64_t ScratchFile::reserve(uint64_t bytes) {
  const uint64_t begin = size_;
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(file_.get(), static_cast<off_t>(begin), static_cast<off_t>(bytes));
  if (error == EOPNOTSUPP || error == EINVAL)
    error = ::ftruncate(file_.get(), static_cast<off_t>(begin + bytes)) != 0 ? errno : 0;
  if (error != 0) {
    (void)!::ftruncate(file_.get(), static_cast<off_t>(begin));  // what was had of it goes back
    const uint64_t available = space_at(folder_).available;
    throw failure(name, folder_.native(),
                  cat("no room for ", bytes, " bytes of scratch beside the ", begin, " that are taken, with ",
                      available, " free; free some, or name another folder"),
                  error);
  }
  size_ += bytes;
  return begin;
}

void ScratchFile::read(uint64_t offset, void* memory, size_t bytes) const {
  all_of(folder_, "read", offset, bytes, [&](size_t done, off_t at) {
    return ::pread(file_.get(), static_cast<char*>(memory) + done, bytes - done, at);
  });
}

void ScratchFile::write(uint64_t offset, const void* memory, size_t bytes) const {
  all_of(folder_, "write", offset, bytes, [&](size_t done, off_t at) {
    return ::pwrite(file_.get(), static_cast<const char*>(memory) + done, bytes - done, at);
  });
}

}  // namespace tesserae::os
