#include "tesserae/data/token_stream.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/base/nearest.h"
#include "tesserae/data/utf8.h"
#include "tesserae/os/files.h"

namespace tesserae::data {

static_assert(std::endian::native == std::endian::little, "tokens are read as they are");

namespace {

constexpr std::pair<std::string_view, Format> formats[] = {
    {"text", Format::text}, {"uint16", Format::uint16}, {"uint32", Format::uint32}, {"tokens", Format::tokens}};

/// Of formats whose files do not say it.
int bytes_of_token(Format format) {
  return format == Format::text ? 1 : format == Format::uint16 ? 2 : 4;
}

int64_t vocabulary_of(const StreamOptions& options) {
  if (options.vocabulary != 0) return options.vocabulary;
  switch (options.format) {
    case Format::text:
      return end_of_file_token + 1;
    case Format::uint16:
      return 1 << 16;
    case Format::tokens:
      return 0;
    case Format::uint32:
      break;
  }
  throw InvalidArgument("TokenStream",
                        "format uint32 does not tell how many different tokens there are; give the vocabulary");
}

bool has_suffix(const std::filesystem::path& path, const std::vector<std::string>& suffixes) {
  const std::string name = path.filename().string();
  return suffixes.empty() ||
         std::any_of(suffixes.begin(), suffixes.end(), [&](const auto& suffix) { return name.ends_with(suffix); });
}

/// Reads the whole file, a block at a time; one of `size` bytes, unless it grows, in one block if that is not large.
bool is_text(const os::Path& path, uint64_t size) {
  const auto file = os::files().open(path);
  std::string block(std::clamp<uint64_t>(size + 1, 16, 1 << 20), '\0');
  size_t kept = 0;  // the beginning of a character that the block before broke off
  for (uint64_t offset = 0;;) {
    const size_t count = file->read_at(offset, {block.data() + kept, block.size() - kept});
    offset += count;
    const std::string_view bytes(block.data(), kept + count);
    if (bytes.size() < block.size()) return is_utf8(bytes);
    kept = broken_off(bytes);
    if (!is_utf8(bytes.substr(0, bytes.size() - kept))) return false;
    std::memmove(block.data(), bytes.data() + bytes.size() - kept, kept);
  }
}

/// Of its first and its last bytes.
uint64_t sum_of_ends(const os::Path& path, uint64_t size) {
  constexpr uint64_t most = 4096;
  const auto file = os::files().open(path);
  std::string ends(2 * most, '\0');
  const size_t first = file->read_at(0, {ends.data(), most});
  const size_t last = file->read_at(size > most ? size - most : 0, {ends.data() + first, most});
  return checksum(std::string_view(ends).substr(0, first + last));
}

}  // namespace

Format format_from_name(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& [known, format] : formats) {
    if (name == known) return format;
    names.emplace_back(known);
  }
  throw InvalidArgument("format_from_name",
                        cat("unknown format \"", name, "\"; did you mean \"", nearest(name, names), "\"?"));
}

TokenStream::TokenStream(const StreamOptions& options) : format_(options.format), vocabulary_(vocabulary_of(options)) {
  if (format_ == Format::text && vocabulary_ <= end_of_file_token) {
    throw InvalidArgument("TokenStream",
                          cat("vocabulary is ", vocabulary_, "; text as bytes needs ", end_of_file_token + 1));
  }
  if (format_ == Format::text) document_end_ = end_of_file_token;
  int64_t unmatched = 0;
  for (const auto& path : options.paths) {
    const auto kind = os::files().status(path).kind;
    if (kind == os::FileKind::missing) {
      throw InvalidArgument("TokenStream", cat("there is no ", path.string(), "; check the path of the data"));
    }
    if (kind != os::FileKind::directory) {
      add(path);
      continue;
    }
    for (const auto& file : os::files().walk(path)) {
      if (has_suffix(file, options.suffixes)) {
        add(file);
      } else {
        ++unmatched;
      }
    }
  }
  if (size_ > 0) return;
  std::string where;
  for (const auto& path : options.paths) where += (where.empty() ? "" : ", ") + path.string();
  throw InvalidArgument("TokenStream", cat("the data set (", where, ") has no token: ", unmatched,
                                           " files do not have the suffixes asked for, ", skipped_,
                                           " are not UTF-8, all others are empty"));
}

void TokenStream::add(const std::filesystem::path& path) {
  const os::FileStatus status = os::files().status(path);
  if (status.kind != os::FileKind::file) return;  // a pipe, a socket, a dangling link
  const auto bytes = static_cast<int64_t>(status.size);
  if (bytes == 0) return;
  if (format_ == Format::tokens) return add_token_file(path);
  if (begins_as_token_file(path)) {
    throw InvalidArgument("TokenStream", cat(path.string(), " is a token file with a header; give the format tokens"));
  }
  if (bytes % bytes_of_token(format_) != 0) {
    throw InvalidArgument("TokenStream", cat(path.string(), " has ", bytes, " bytes, no multiple of ",
                                             bytes_of_token(format_), "; is it of another format?"));
  }
  if (format_ == Format::text && !is_text(path, status.size)) {
    ++skipped_;
    return;
  }
  add_to_fingerprint(bytes, sum_of_ends(path, status.size));
  files_.push_back({path, size_, bytes_of_token(format_)});
  size_ += bytes / bytes_of_token(format_) + (format_ == Format::text ? 1 : 0);
}

void TokenStream::add_token_file(const std::filesystem::path& path) {
  auto file = std::make_unique<TokenFile>(path);
  const TokenFileInfo& info = file->info();
  if (vocabulary_ == 0) vocabulary_ = info.vocabulary;
  if (info.vocabulary > vocabulary_) {
    throw InvalidArgument("TokenStream",
                          cat(path.string(), " has a vocabulary of ", info.vocabulary, ", more than the ", vocabulary_,
                              files_.empty() ? " asked for" : " of the files before it",
                              "; files of one data set come from one tokenizer"));
  }
  if (files_.empty()) document_end_ = info.document_end;
  if (!files_.empty()) {
    const TokenFileInfo& first = files_.front().token_file->info();
    const auto text = [](std::optional<int64_t> end) { return end ? cat("token ", *end) : std::string("no token"); };
    if (first.vocabulary != info.vocabulary || first.document_end != info.document_end) {
      throw InvalidArgument(
          "TokenStream", cat(path.string(), " has a vocabulary of ", info.vocabulary, " and ends documents with ",
                             text(info.document_end), ", but ", files_.front().path.string(), " has ", first.vocabulary,
                             " and ", text(first.document_end), "; files of one data set come from one tokenizer"));
    }
  }
  add_to_fingerprint(info.tokens, file->sum());
  files_.push_back({path, size_, info.bytes_per_token, std::move(file)});
  size_ += files_.back().token_file->info().tokens;
}

void TokenStream::add_to_fingerprint(int64_t tokens, uint64_t sum) {
  fingerprint_ = checksum_of_blocks({fingerprint_, static_cast<uint64_t>(tokens), sum});
}

void TokenStream::read(int64_t begin, std::span<int64_t> tokens) {
  if (begin < 0 || begin + static_cast<int64_t>(tokens.size()) > size_) {
    throw InvalidArgument("TokenStream::read", cat("tokens [", begin, ", ", begin + static_cast<int64_t>(tokens.size()),
                                                   ") of a stream of ", size_));
  }
  auto after = std::upper_bound(files_.begin(), files_.end(), begin,
                                [](int64_t position, const File& file) { return position < file.begin; });
  for (auto file = static_cast<size_t>(after - files_.begin()) - 1; !tokens.empty(); ++file) {
    const auto count = std::min<int64_t>(end_of(file) - begin, static_cast<int64_t>(tokens.size()));
    read_file(file, begin - files_[file].begin, tokens.first(static_cast<size_t>(count)));
    tokens = tokens.subspan(static_cast<size_t>(count));
    begin += count;
  }
}

void TokenStream::check_size(const File& file, int64_t tokens, uint64_t found) const {
  const auto expected = static_cast<uint64_t>(tokens * file.bytes_per_token);
  if (found == expected) return;
  throw Corruption("TokenStream::read", cat(file.path.string(), " had ", expected, " bytes and now has ", found,
                                            "; data must not change while it is read"));
}

void TokenStream::read_file(size_t index, int64_t offset, std::span<int64_t> tokens) {
  const File& file = files_[index];
  const int64_t end_tokens = format_ == Format::text ? 1 : 0;
  const int64_t count = end_of(index) - file.begin - end_tokens;
  if (!file.token_file && !open_.has(index)) {
    const os::FileStatus status = os::files().status(file.path);
    // Of a missing one, opening it says so.
    if (status.kind != os::FileKind::missing) check_size(file, count, status.size);
  }
  if (end_tokens > 0 && offset + static_cast<int64_t>(tokens.size()) > count) {
    tokens.back() = end_of_file_token;
    tokens = tokens.first(tokens.size() - 1);
  }
  os::ReadableFile& open = open_.get(index, file.path);
  if (file.token_file) {
    file.token_file->read(open, offset, static_cast<int64_t>(tokens.size()), bytes_);
  } else {
    bytes_.resize(tokens.size() * static_cast<size_t>(file.bytes_per_token));
    const auto begin = static_cast<uint64_t>(offset * file.bytes_per_token);
    const size_t found = open.read_at(begin, bytes_);
    if (found < bytes_.size()) check_size(file, count, begin + found);
  }
  switch (file.bytes_per_token) {
    case 1:
      return decode<uint8_t>(file, offset, tokens);
    case 2:
      return decode<uint16_t>(file, offset, tokens);
    default:
      return decode<uint32_t>(file, offset, tokens);
  }
}

template <class Token>
void TokenStream::decode(const File& file, int64_t offset, std::span<int64_t> tokens) const {
  for (size_t i = 0; i < tokens.size(); ++i) {
    Token token = 0;
    std::memcpy(&token, bytes_.data() + i * sizeof(Token), sizeof(Token));
    if (static_cast<int64_t>(token) >= vocabulary_) {
      throw InvalidArgument("TokenStream::read",
                            cat(file.path.string(), " has token ", token, " at offset ",
                                offset + static_cast<int64_t>(i), "; the vocabulary is ", vocabulary_));
    }
    tokens[i] = static_cast<int64_t>(token);
  }
}

}  // namespace tesserae::data
