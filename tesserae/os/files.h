#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae::os {

using Path = std::filesystem::path;

/// A file open for reading. Reads at different offsets may run in several threads.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  /// Fills `bytes` from `offset` on and returns how many there were: fewer only at the end of the file.
  virtual size_t read_at(uint64_t offset, std::span<char> bytes) = 0;
  /// From now on reads come from the medium, not from memory of the host, as far as the system can do that: not what
  /// was written and not synced.
  virtual void forget_cached() {}
};

/// A file open for writing at its end. Nothing is buffered here: write() hands over to the kernel, sync() makes it
/// last. Destroying it closes it and swallows a failure; call close() where that matters.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual void write(std::string_view bytes) = 0;  ///< all of them; after a failure an unknown part is written
  virtual void sync() = 0;                         ///< returns when data and size are on the medium
  virtual void close() = 0;                        ///< at most once; some file systems report a full disk only here
};

enum class FileKind { missing, file, directory, other };

struct FileStatus {
  FileKind kind = FileKind::missing;  ///< of what a symbolic link points to
  bool is_link = false;
  uint64_t size = 0;
  std::chrono::system_clock::time_point modified = {};  ///< by the clock of whoever keeps the file
};

/// The file system. Everything in the project that touches files goes through files(), so that a test can swap in a
/// twin that fails, counts or forgets (faulty_files.h).
///
/// The virtual functions are the operations that can fail one by one: each is one step of the system, so that what is
/// built on them meets every failure between two steps. All throw IoError naming the path and the reason. Thread-safe.
class Files {
 public:
  virtual ~Files() = default;

  virtual std::unique_ptr<ReadableFile> open(const Path& path) = 0;
  virtual std::unique_ptr<WritableFile> create(const Path& path) = 0;  ///< empty; an older file is truncated
  virtual std::unique_ptr<WritableFile> append(const Path& path) = 0;  ///< created if it is missing
  virtual FileStatus status(const Path& path) = 0;                     ///< a missing file is no failure
  virtual std::vector<std::string> list(const Path& directory) = 0;    ///< names, sorted
  virtual void make_directory(const Path& path) = 0;                   ///< fine if it is there
  virtual void rename(const Path& from, const Path& to) = 0;           ///< atomic; replaces a file
  /// Another name for a file. False, and nothing is done, if something has that name already.
  virtual bool link(const Path& file, const Path& name) = 0;
  virtual void remove(const Path& path) = 0;          ///< a file or an empty directory
  virtual void sync_directory(const Path& path) = 0;  ///< makes its names last

  // Built on the above.
  std::string read(const Path& path);
  void write(const Path& path, std::string_view bytes);         ///< not durable: for that create, write, sync, close
  void write_synced(const Path& path, std::string_view bytes);  ///< on the medium when it returns, but not its name
  bool exists(const Path& path) { return status(path).kind != FileKind::missing; }
  void make_directories(const Path& path);  ///< with those above it; the names of new ones last
  void remove_all(const Path& path);        ///< links are removed, not followed; fine if it is missing
  /// Every file below `root`, sorted by path; links to directories are not followed. `root` itself if it is a file.
  std::vector<Path> walk(const Path& root);
};

/// The file system that this process uses: the real one unless a ScopedFiles is alive.
Files& files();

/// Makes files() return `twin` while it lives. For tests; not from several threads.
class ScopedFiles {
 public:
  explicit ScopedFiles(Files& twin);
  ~ScopedFiles();
  ScopedFiles(const ScopedFiles&) = delete;
  ScopedFiles& operator=(const ScopedFiles&) = delete;

 private:
  Files* previous_;
};

}  // namespace tesserae::os
