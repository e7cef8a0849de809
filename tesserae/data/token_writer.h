#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tesserae/data/token_file.h"
#include "tesserae/os/file_lock.h"
#include "tesserae/os/files.h"

namespace tesserae::data {

struct TokenWriterOptions {
  int64_t vocabulary = 0;
  std::optional<int64_t> document_end = std::nullopt;
  int bytes_per_token = 0;  ///< 2 or 4; 0: the fewest that hold the vocabulary
  bool header = true;       ///< false: the tokens alone (nanoGPT's .bin), of format uint16 or uint32
  bool replace = false;     ///< a file that is there already
};

/// Writes a token file from its first token to its last, in little memory. Until finish() there is only PATH.tmp, which
/// is removed if it never comes to that; a process that is killed leaves it, and the next writer takes it over. Used
/// from one thread.
class TokenWriter {
 public:
  /// Throws InvalidArgument for a vocabulary or a document_end that cannot be, for a file that is there and is not to
  /// be replaced, and while another process writes it; IoError.
  TokenWriter(os::Path path, const TokenWriterOptions& options);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  /// Throws InvalidArgument, and has taken none of them, if one is not below the vocabulary; IoError.
  void add(std::span<const uint32_t> tokens);
  int64_t tokens() const { return info_.tokens; }
  int bytes_per_token() const { return info_.bytes_per_token; }

  /// On the disk, under its name, when it returns; nothing can be added then. Throws InvalidArgument if there is no
  /// token, IoError.
  void finish();
  /// Gives up what was not finished; nothing is left of it.
  void discard();

 private:
  template <class Token>
  void put(std::span<const uint32_t> tokens);
  void write_block(std::string_view block);

  const os::Path path_, temporary_;
  const bool header_;
  TokenFileInfo info_;
  std::optional<os::FileLock> lock_;
  std::unique_ptr<os::WritableFile> file_;  // null after finish()
  std::string buffer_;                      // less than a block
  std::vector<uint64_t> sums_;
};

}  // namespace tesserae::data
