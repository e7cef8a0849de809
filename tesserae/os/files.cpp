#include "tesserae/os/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "tesserae/os/descriptor.h"
#include "tesserae/os/failure.h"

namespace tesserae::os {
namespace {

Descriptor open_descriptor(std::string_view function, const Path& path, int flags) {
  int number;
  do {
    number = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (number < 0 && errno == EINTR);
  if (number < 0) throw failure(function, path.native(), "cannot open");
  return Descriptor(number);
}

/// fsync(2). On some file systems of networks a signal interrupts it: no failure, and nothing was dropped.
int sync_to_storage(const Descriptor& descriptor) {
  int done;
  do {
    done = ::fsync(descriptor.get());
  } while (done != 0 && errno == EINTR);
  return done;
}

class PosixReadable : public ReadableFile {
 public:
  PosixReadable(Path path, Descriptor descriptor) : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  size_t read_at(uint64_t offset, std::span<char> bytes) override {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t count =
          ::pread(descriptor_.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw failure("ReadableFile::read_at", path_.native(), cat("cannot read at ", offset + done));
      if (count == 0) break;
      done += static_cast<size_t>(count);
    }
    return done;
  }

  void forget_cached() override {
    if (const int error = ::posix_fadvise(descriptor_.get(), 0, 0, POSIX_FADV_DONTNEED)) {
      throw failure("ReadableFile::forget_cached", path_.native(), "cannot take it out of the host's memory", error);
    }
  }

 private:
  Path path_;
  Descriptor descriptor_;
};

class PosixWritable : public WritableFile {
 public:
  PosixWritable(Path path, Descriptor descriptor) : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  void write(std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t count = ::write(descriptor_.get(), bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw failure("WritableFile::write", path_.native(), cat("cannot write ", bytes.size(), " bytes"));
      bytes.remove_prefix(static_cast<size_t>(count));
    }
  }

  // Never tried again after a failure: the kernel drops the dirty pages it could not write, and a second fsync
  // succeeds.
  void sync() override {
    if (sync_to_storage(descriptor_) != 0) throw failure("WritableFile::sync", path_.native(), "cannot sync");
  }

  void close() override {
    // If a signal came while it was closed, it is closed all the same.
    if (::close(descriptor_.release()) != 0 && errno != EINTR) {
      throw failure("WritableFile::close", path_.native(), "cannot close");
    }
  }

 private:
  Path path_;
  Descriptor descriptor_;
};

class PosixFiles : public Files {
 public:
  std::unique_ptr<ReadableFile> open(const Path& path) override {
    return std::make_unique<PosixReadable>(path, open_descriptor("Files::open", path, O_RDONLY));
  }

  std::unique_ptr<WritableFile> create(const Path& path) override {
    return std::make_unique<PosixWritable>(path, open_descriptor("Files::create", path, O_WRONLY | O_CREAT | O_TRUNC));
  }

  std::unique_ptr<WritableFile> append(const Path& path) override {
    return std::make_unique<PosixWritable>(path, open_descriptor("Files::append", path, O_WRONLY | O_CREAT | O_APPEND));
  }

  FileStatus status(const Path& path) override {
    struct stat facts {};
    FileStatus status;
    if (::lstat(path.c_str(), &facts) != 0) return missing_or_throw(path, status);
    status.is_link = S_ISLNK(facts.st_mode);
    if (status.is_link && ::stat(path.c_str(), &facts) != 0) return missing_or_throw(path, status);
    status.kind = S_ISREG(facts.st_mode)   ? FileKind::file
                  : S_ISDIR(facts.st_mode) ? FileKind::directory
                                           : FileKind::other;
    status.size = static_cast<uint64_t>(facts.st_size);
    status.modified += std::chrono::seconds(facts.st_mtim.tv_sec) + std::chrono::nanoseconds(facts.st_mtim.tv_nsec);
    return status;
  }

  std::vector<std::string> list(const Path& directory) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(directory.c_str()), ::closedir);
    if (stream == nullptr) throw failure("Files::list", directory.native(), "cannot open");
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(stream.get());
      if (entry == nullptr) break;
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    if (errno != 0) throw failure("Files::list", directory.native(), "cannot read");
    std::ranges::sort(names);
    return names;
  }

  void make_directory(const Path& path) override {
    if (::mkdir(path.c_str(), 0777) == 0) return;
    const int error = errno;
    if (error == EEXIST && status(path).kind == FileKind::directory) return;
    throw failure("Files::make_directory", path.native(), "cannot create", error);
  }

  void rename(const Path& from, const Path& to) override {
    if (::rename(from.c_str(), to.c_str()) == 0) return;
    throw failure("Files::rename", from.native(), cat("cannot rename to ", to.native()));
  }

  bool link(const Path& file, const Path& name) override {
    if (::link(file.c_str(), name.c_str()) == 0) return true;
    if (errno == EEXIST) return false;
    throw failure("Files::link", file.native(), cat("cannot be named ", name.native(), ", too"));
  }

  void remove(const Path& path) override {
    if (::remove(path.c_str()) != 0) throw failure("Files::remove", path.native(), "cannot remove");
  }

  void sync_directory(const Path& path) override {
    const Descriptor descriptor = open_descriptor("Files::sync_directory", path, O_RDONLY | O_DIRECTORY);
    if (sync_to_storage(descriptor) != 0) throw failure("Files::sync_directory", path.native(), "cannot sync");
  }

 private:
  static FileStatus missing_or_throw(const Path& path, FileStatus status) {
    if (errno == ENOENT || errno == ENOTDIR) return status;
    throw failure("Files::status", path.native(), "cannot stat");
  }
};

std::atomic<Files*> current{nullptr};

}  // namespace

std::string Files::read(const Path& path) {
  const std::unique_ptr<ReadableFile> file = open(path);
  // The size is only a hint: files of /proc say 0, and others may grow while they are read.
  std::string bytes(std::max<size_t>(status(path).size + 1, 4096), '\0');
  size_t length = 0;
  while (true) {
    length += file->read_at(length, {bytes.data() + length, bytes.size() - length});
    if (length < bytes.size()) break;
    bytes.resize(bytes.size() * 2);
  }
  bytes.resize(length);
  return bytes;
}

void Files::write(const Path& path, std::string_view bytes) {
  const std::unique_ptr<WritableFile> file = create(path);
  file->write(bytes);
  file->close();
}

void Files::write_synced(const Path& path, std::string_view bytes) {
  const std::unique_ptr<WritableFile> file = create(path);
  file->write(bytes);
  file->sync();
  file->close();
}

void Files::make_directories(const Path& path) {
  if (path.empty() || status(path).kind == FileKind::directory) return;
  const Path above = path.has_parent_path() ? path.parent_path() : Path(".");
  if (above != path) make_directories(above);
  if (!path.has_filename()) return;
  make_directory(path);
  sync_directory(above);
}

void Files::remove_all(const Path& path) {
  const FileStatus found = status(path);
  if (found.kind == FileKind::missing && !found.is_link) return;
  if (found.kind == FileKind::directory && !found.is_link) {
    for (const std::string& name : list(path)) remove_all(path / name);
  }
  remove(path);
}

std::vector<Path> Files::walk(const Path& root) {
  const FileStatus found = status(root);
  if (found.kind == FileKind::file) return {root};
  std::vector<Path> all;
  std::vector<Path> pending{root};
  while (!pending.empty()) {
    const Path directory = std::move(pending.back());
    pending.pop_back();
    for (const std::string& name : list(directory)) {
      const Path path = directory / name;
      const FileStatus entry = status(path);
      if (entry.kind == FileKind::file) all.push_back(path);
      if (entry.kind == FileKind::directory && !entry.is_link) pending.push_back(path);
    }
  }
  std::ranges::sort(all);
  return all;
}

Files& files() {
  static PosixFiles real;
  Files* swapped = current.load();
  return swapped == nullptr ? real : *swapped;
}

ScopedFiles::ScopedFiles(Files& twin) : previous_(current.exchange(&twin)) {}

ScopedFiles::~ScopedFiles() {
  current = previous_;
}

}  // namespace tesserae::os
