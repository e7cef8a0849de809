#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "tesserae/checkpoint/folder.h"
#include "tesserae/os/file_lock.h"
#include "tesserae/os/files.h"

namespace tesserae::train {

/// Another run has the folder: its process lives, or it has taken the folder over.
class FolderInUse : public checkpoint::FolderTaken {
 public:
  using checkpoint::FolderTaken::FolderTaken;
};

/// A run's claim on a folder that it writes. Rank 0 has one of its run folder, and one of its folder of checkpoints,
/// before it touches anything else in them. folder_owner.cpp opens with the protocol.
class FolderOwner {
 public:
  /// Claims `folder`, which is made if it is missing. Throws FolderInUse, naming host and process, if a live run has
  /// it, IoError where it cannot be written. `lost`: this run had it, through a rank that is lost, whose lock may stay
  /// a while. It is waited for so long, and then done without if nobody has claimed the folder since that generation.
  struct Lost {
    int64_t generation = 0;
    std::chrono::milliseconds patience{0};
  };
  explicit FolderOwner(const os::Path& folder, const std::optional<Lost>& lost = std::nullopt);

  /// 32 hexadecimal digits: the same for all runs that went on in this folder, and another one once it was removed.
  const std::string& identity() const { return identity_; }
  /// How many runs have claimed the folder, with this one.
  int64_t generation() const { return generation_; }
  /// Throws FolderInUse if another run has claimed the folder since. Before what cannot be taken back is written.
  void require() const;

 private:
  os::Path folder_;
  std::optional<os::FileLock> lock_;  // none: the file system has no locks
  std::string identity_;
  int64_t generation_ = 0;
};

}  // namespace tesserae::train
