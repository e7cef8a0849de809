#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tesserae/os/files.h"

namespace tesserae::testing {

/// A file system in memory that tells what a medium holds from what processes see. As POSIX has it, and no better: what
/// was written to a file lasts once the file is synced, and what was done to the names of a directory once that
/// directory is. lose_power() takes the rest back. Thread-safe; files stay readable when their name is gone.
class MemoryFiles : public os::Files {
 public:
  MemoryFiles();
  MemoryFiles(const MemoryFiles& other);  ///< a copy of all that is there

  std::unique_ptr<os::ReadableFile> open(const os::Path& path) override;
  std::unique_ptr<os::WritableFile> create(const os::Path& path) override;
  std::unique_ptr<os::WritableFile> append(const os::Path& path) override;
  os::FileStatus status(const os::Path& path) override;
  std::vector<std::string> list(const os::Path& directory) override;
  void make_directory(const os::Path& path) override;
  void rename(const os::Path& from, const os::Path& to) override;
  bool link(const os::Path& file, const os::Path& name) override;
  void remove(const os::Path& path) override;
  void sync_directory(const os::Path& path) override;

  /// What happens to what was not synced.
  enum class Unsynced {
    lost,   ///< all of it is gone
    kept,   ///< all of it has reached the medium by chance
    mixed,  ///< some: of each directory a random beginning of its changes, of each file a random part, perhaps zeros
  };
  void lose_power(Unsynced unsynced, uint64_t seed = 0);

  /// The bytes of a file, to be damaged at will.
  std::string& bytes(const os::Path& path);

  struct Node;
  using Names = std::map<std::string, std::shared_ptr<Node>>;
  struct Node {
    bool directory = false;
    std::string content, lasting_content;
    Names names, lasting_names;
    std::vector<std::function<void(Names&)>> changes;  ///< of names, since the last sync
  };

 private:
  class Readable;
  class Writable;

  std::shared_ptr<Node> find(const os::Path& path) const;
  Node& directory_of(const os::Path& path, std::string_view operation) const;
  std::unique_ptr<os::WritableFile> write_to(const os::Path& path, bool truncate);
  static void change(Node& directory, std::function<void(Names&)> apply);
  static void revert(Node& node, Unsynced unsynced, std::mt19937_64& random);

  mutable std::mutex mutex_;
  std::shared_ptr<Node> root_;
};

}  // namespace tesserae::testing
