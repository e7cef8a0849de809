#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/data/open_files.h"

namespace tesserae::data {

enum class Format {
  text,    ///< UTF-8 as bytes: tokens 0..255, and 256 after each file
  uint16,  ///< tokens, little-endian, without a header (nanoGPT's .bin)
  uint32,
};

/// "text", "uint16" or "uint32"; throws InvalidArgument for anything else, naming the nearest.
Format format_from_name(std::string_view name);

inline constexpr int64_t end_of_file_token = 256;

struct StreamOptions {
  std::vector<std::filesystem::path> paths;  ///< files, and folders read recursively in sorted order
  Format format = Format::text;
  std::vector<std::string> suffixes = {};  ///< in folders, only files whose names end so are read; empty: all
  int64_t vocabulary = 0;  ///< tokens are below this; 0: 257 for text, 65,536 for uint16; uint32 needs it
};

/// All tokens of a data set, one file after the other. Only what is asked for is read: a stream of a terabyte takes
/// memory for the names of its files. Used from one thread.
class TokenStream {
 public:
  /// Finds the files. Text files are read through once, to leave out (and count) those that are not UTF-8. Throws
  /// InvalidArgument for a path that does not exist, a token file of a size that is no multiple of a token, a missing
  /// vocabulary, and a data set without a token.
  explicit TokenStream(const StreamOptions& options);

  int64_t size() const { return size_; }  ///< in tokens
  int64_t vocabulary() const { return vocabulary_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  int64_t skipped_files() const { return skipped_; }  ///< that were not UTF-8

  /// Fills `tokens` from token `begin` on. Throws InvalidArgument naming file and offset for a token that is not below
  /// the vocabulary, Corruption for a file that has become shorter or grown, and IoError. That a file has grown is
  /// noticed only when it is opened.
  void read(int64_t begin, std::span<int64_t> tokens);

 private:
  struct File {
    std::filesystem::path path;
    int64_t begin;  // its first token in the stream
  };

  void add(const std::filesystem::path& path);
  int64_t end_of(size_t file) const { return file + 1 < files_.size() ? files_[file + 1].begin : size_; }
  void read_file(size_t file, int64_t offset, std::span<int64_t> tokens);
  template <class Token>
  void decode(const File& file, int64_t offset, std::span<int64_t> tokens) const;

  Format format_;
  int64_t vocabulary_;
  std::vector<File> files_;
  int64_t size_ = 0;
  int64_t skipped_ = 0;
  OpenFiles open_;
  std::string bytes_;  // read last
};

}  // namespace tesserae::data
