#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/data/open_files.h"
#include "tesserae/data/token_file.h"

namespace tesserae::data {

enum class Format {
  text,    ///< UTF-8 as bytes: tokens 0..255, and 256 after each file
  uint16,  ///< tokens, little-endian, without a header (nanoGPT's .bin)
  uint32,
  tokens,  ///< token files, which say what they hold and have checksums (token_file.h)
};

/// "text", "uint16", "uint32" or "tokens"; throws InvalidArgument for anything else, naming the nearest.
Format format_from_name(std::string_view name);

inline constexpr int64_t end_of_file_token = 256;

struct StreamOptions {
  std::vector<std::filesystem::path> paths;  ///< files, and folders read recursively in sorted order
  Format format = Format::text;
  std::vector<std::string> suffixes = {};  ///< in folders, only files whose names end so are read; empty: all
  /// Tokens are below this; 0: 257 for text, 65,536 for uint16, what token files say; uint32 needs it.
  int64_t vocabulary = 0;
};

/// All tokens of a data set, one file after the other. Only what is asked for is read: a stream of a terabyte takes
/// memory for the names of its files. Used from one thread.
class TokenStream {
 public:
  /// Finds the files. Text files are read through once, to leave out (and count) those that are not UTF-8. Throws
  /// InvalidArgument for a path that does not exist, files that are not of the format, token files of different
  /// tokenizers, a missing or too small vocabulary, and a data set without a token; Corruption for a token file that is
  /// damaged around its tokens.
  explicit TokenStream(const StreamOptions& options);

  int64_t size() const { return size_; }  ///< in tokens
  int64_t vocabulary() const { return vocabulary_; }
  /// The token after each document, where the format tells: of text, and of token files that have one.
  std::optional<int64_t> document_end() const { return document_end_; }
  /// Another one for other files, or the same in another order; of the same files wherever they lie. Of token files it
  /// covers every byte, of others their sizes, beginnings and ends.
  uint64_t fingerprint() const { return fingerprint_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  int64_t skipped_files() const { return skipped_; }  ///< that were not UTF-8

  /// Fills `tokens` from token `begin` on. Throws InvalidArgument naming file and offset for a token that is not below
  /// the vocabulary, Corruption for a file that has become shorter or grown, or of whose bytes a checksum says that
  /// they have changed, and IoError. That a file has grown is noticed only when it is opened.
  void read(int64_t begin, std::span<int64_t> tokens);

 private:
  struct File {
    std::filesystem::path path;
    int64_t begin;  // its first token in the stream
    int bytes_per_token;
    std::unique_ptr<TokenFile> token_file = nullptr;  // of format tokens
  };

  void add(const std::filesystem::path& path);
  void add_token_file(const std::filesystem::path& path);
  void add_to_fingerprint(int64_t tokens, uint64_t sum);
  int64_t end_of(size_t file) const { return file + 1 < files_.size() ? files_[file + 1].begin : size_; }
  void read_file(size_t file, int64_t offset, std::span<int64_t> tokens);
  void check_size(const File& file, int64_t tokens, uint64_t found) const;
  template <class Token>
  void decode(const File& file, int64_t offset, std::span<int64_t> tokens) const;

  Format format_;
  int64_t vocabulary_;  // 0 until the first token file tells
  std::optional<int64_t> document_end_;
  std::vector<File> files_;
  int64_t size_ = 0;
  int64_t skipped_ = 0;
  uint64_t fingerprint_ = 0;
  OpenFiles open_;
  std::string bytes_;  // read last
};

}  // namespace tesserae::data
