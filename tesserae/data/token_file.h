#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/os/files.h"

namespace tesserae::data {

/// What a token file says of itself; its bytes: docs/format.md.
struct TokenFileInfo {
  int bytes_per_token = 2;                             ///< 2 or 4
  int64_t vocabulary = 0;                              ///< tokens are below this
  std::optional<int64_t> document_end = std::nullopt;  ///< the token after each document
  int64_t tokens = 0;

  uint64_t data_bytes() const { return static_cast<uint64_t>(tokens) * static_cast<uint64_t>(bytes_per_token); }
};

/// Whether the file begins as token files do. Throws IoError.
bool begins_as_token_file(const os::Path& path);

/// A token file that is read: whole blocks, each compared with its checksum when it is first touched, so that opening a
/// terabyte costs two small reads. Keeps a bit a block in memory, and no file open. Used from one thread.
class TokenFile {
 public:
  /// Reads what stands around the tokens. Throws InvalidArgument for a file that is none, or of a later version,
  /// Corruption naming the bytes for one that is damaged or cut short, IoError.
  explicit TokenFile(os::Path path);

  const TokenFileInfo& info() const { return info_; }
  uint64_t sum() const { return sum_of_sums_; }  ///< the checksum of its blocks' checksums, as its end says

  /// `bytes` becomes those of tokens [begin, begin + count), which lie in the file, read from `file`: this one, open.
  /// Throws Corruption naming the bytes of a block that has changed, IoError.
  void read(os::ReadableFile& file, int64_t begin, int64_t count, std::string& bytes);

  /// Compares every byte of the file with the checksums. `progress` is called with the bytes that are done. Throws
  /// Corruption for the first block that has changed or has a token outside the vocabulary, IoError.
  void verify(const std::function<void(uint64_t bytes)>& progress = {});

 private:
  uint64_t blocks() const;
  void read_exactly(os::ReadableFile& file, uint64_t offset, std::span<char> bytes) const;
  /// Of blocks [first, last) with these bytes: whether they are what was written.
  void compare(os::ReadableFile& file, uint64_t first, uint64_t last, std::string_view bytes);
  void check_vocabulary(uint64_t offset, std::string_view bytes) const;

  os::Path path_;
  TokenFileInfo info_;
  uint64_t size_ = 0;         // of the file
  uint64_t sum_of_sums_ = 0;  // the checksum of the blocks' checksums
  std::vector<bool> good_;    // blocks that were compared
};

}  // namespace tesserae::data
