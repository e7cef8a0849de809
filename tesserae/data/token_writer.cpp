#include "tesserae/data/token_writer.h"

#include <algorithm>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/data/token_format.h"

namespace tesserae::data {
namespace {

TokenFileInfo checked(const TokenWriterOptions& options) {
  const int64_t vocabulary = options.vocabulary;
  if (vocabulary < 1 || vocabulary > int64_t{1} << 32) {
    throw InvalidArgument("TokenWriter", cat("vocabulary is ", vocabulary, "; it must lie in [1, 2^32]"));
  }
  if (options.document_end && (*options.document_end < 0 || *options.document_end >= vocabulary)) {
    throw InvalidArgument("TokenWriter",
                          cat("document_end is ", *options.document_end, "; the tokens are 0 to ", vocabulary - 1));
  }
  const int needed = vocabulary <= 1 << 16 ? 2 : 4;
  const int bytes = options.bytes_per_token == 0 ? needed : options.bytes_per_token;
  if ((bytes != 2 && bytes != 4) || bytes < needed) {
    throw InvalidArgument("TokenWriter", cat(bytes, " bytes a token; a vocabulary of ", vocabulary, " takes ",
                                             needed == 2 ? "2 or 4" : "4"));
  }
  return {.bytes_per_token = bytes, .vocabulary = vocabulary, .document_end = options.document_end, .tokens = 0};
}

os::Path with_end(os::Path path, const char* end) {
  path += end;
  return path;
}

}  // namespace

TokenWriter::TokenWriter(os::Path path, const TokenWriterOptions& options)
    : path_(std::move(path)), temporary_(with_end(path_, ".tmp")), header_(options.header), info_(checked(options)) {
  if (!options.replace && os::files().exists(path_)) {
    throw InvalidArgument("TokenWriter", cat(path_.string(), " is there already; remove it, or ask to replace it"));
  }
  lock_ = os::FileLock::try_lock(temporary_);
  if (!lock_) {
    throw InvalidArgument("TokenWriter", cat("another process is writing ", path_.string(), " (it holds ",
                                             temporary_.string(), "); wait for it, or give another name"));
  }
  file_ = os::files().create(temporary_);
  if (header_) file_->write(token_header(info_));
}

TokenWriter::~TokenWriter() {
  discard();
}

void TokenWriter::discard() {
  if (!file_) return;
  file_.reset();
  try {
    os::files().remove(temporary_);
  } catch (const IoError&) {
    // It stays, under a name that nobody reads.
  }
}

void TokenWriter::add(std::span<const uint32_t> tokens) {
  if (!file_) throw InvalidArgument("TokenWriter::add", cat(path_.string(), " is finished"));
  const auto wrong = std::find_if(tokens.begin(), tokens.end(),
                                  [&](uint32_t token) { return static_cast<int64_t>(token) >= info_.vocabulary; });
  if (wrong != tokens.end()) {
    throw InvalidArgument("TokenWriter::add", cat("token ", *wrong, " at ", info_.tokens + (wrong - tokens.begin()),
                                                  "; the vocabulary is ", info_.vocabulary));
  }
  if (info_.bytes_per_token == 2) {
    put<uint16_t>(tokens);
  } else {
    put<uint32_t>(tokens);
  }
}

template <class Token>
void TokenWriter::put(std::span<const uint32_t> tokens) {
  for (const uint32_t token : tokens) {
    const auto narrow = static_cast<Token>(token);
    buffer_.append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    if (buffer_.size() < token_block_bytes) continue;
    write_block(buffer_);
    buffer_.clear();
  }
  info_.tokens += static_cast<int64_t>(tokens.size());
}

void TokenWriter::write_block(std::string_view block) {
  file_->write(block);
  if (header_) sums_.push_back(checksum(block));
}

void TokenWriter::finish() {
  if (!file_) throw InvalidArgument("TokenWriter::finish", cat(path_.string(), " is finished"));
  if (info_.tokens == 0) {
    throw InvalidArgument("TokenWriter::finish",
                          cat("there is no token for ", path_.string(), "; is there any text in what was given?"));
  }
  if (!buffer_.empty()) write_block(buffer_);
  if (header_) {
    file_->write({reinterpret_cast<const char*>(sums_.data()), sums_.size() * sizeof(uint64_t)});
    file_->write(token_footer(token_header(info_), info_.tokens, checksum_of_blocks(sums_)));
  }
  file_->sync();
  file_->close();
  os::files().rename(temporary_, path_);
  file_.reset();
  const os::Path folder = path_.parent_path();
  os::files().sync_directory(folder.empty() ? os::Path(".") : folder);
}

}  // namespace tesserae::data
