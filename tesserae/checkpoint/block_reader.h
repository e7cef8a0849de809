#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tesserae/checkpoint/manifest.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// A data file of a checkpoint, read block by block against the manifest's checksums.
class BlockReader {
 public:
  /// Throws Damaged if the file is missing or has another size, IoError if it cannot be opened.
  BlockReader(const os::Path& directory, const DataFile& file, uint64_t block_bytes);

  uint64_t blocks() const { return facts_.blocks.size(); }
  uint64_t begin(uint64_t block) const { return block * block_bytes_; }
  uint64_t end(uint64_t block) const;

  /// Blocks are read from the medium from now on (os::ReadableFile).
  void forget_cached() const { file_->forget_cached(); }
  /// Reads a block into `bytes` (of exactly its size). What is wrong with it; empty: nothing. Throws IoError.
  std::string read(uint64_t block, std::span<char> bytes) const;

  const os::Path& path() const { return path_; }

 private:
  os::Path path_;
  const DataFile& facts_;
  uint64_t block_bytes_;
  std::unique_ptr<os::ReadableFile> file_;
};

}  // namespace tesserae::checkpoint
