#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "tesserae/os/files.h"

namespace tesserae::os {

/// A Files that passes every operation on to another one and makes chosen ones fail, for tests.
///
/// Operations are numbered from 1 in the order in which they happen, those on open files (read_at, write, sync, close)
/// included. A test runs once without a fault to learn operations(), then once for every k with fail_at(k).
/// Thread-safe; must outlive the files that it opened.
class FaultyFiles : public Files {
 public:
  explicit FaultyFiles(Files& under) : under_(under) {}

  /// What a fault does to the chosen operation. It always throws IoError with the reason of `error`.
  struct Fault {
    int error = 5;  ///< an errno: EIO by default
    /// A write first lets this share of its bytes through, as a disk does that fills up half way.
    double written = 0;
    /// Every later operation fails too, as when the disk is gone; otherwise only the chosen one.
    bool lasting = false;
  };
  /// The operation with that number will fail; 0: none will. Starts counting anew.
  void fail_at(int number, Fault fault);
  void fail_at(int number) { fail_at(number, Fault()); }

  int operations() const;                ///< since construction or fail_at
  std::vector<std::string> log() const;  ///< "write /path", one line per operation, the failed ones included

  std::unique_ptr<ReadableFile> open(const Path& path) override;
  std::unique_ptr<WritableFile> create(const Path& path) override;
  std::unique_ptr<WritableFile> append(const Path& path) override;
  FileStatus status(const Path& path) override;
  std::vector<std::string> list(const Path& directory) override;
  void make_directory(const Path& path) override;
  void rename(const Path& from, const Path& to) override;
  bool link(const Path& file, const Path& name) override;
  void remove(const Path& path) override;
  void sync_directory(const Path& path) override;

 private:
  class Readable;
  class Writable;

  /// Counts the operation; the fault if it is to fail.
  const Fault* count(std::string_view operation, const Path& path);
  void step(std::string_view operation, const Path& path);  ///< count(), and throws the fault

  Files& under_;
  mutable std::mutex mutex_;
  int failing_ = 0;
  Fault fault_;
  std::vector<std::string> log_;
};

}  // namespace tesserae::os
