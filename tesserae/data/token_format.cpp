#include "tesserae/data/token_format.h"

#include <bit>
#include <cstring>
#include <limits>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"

namespace tesserae::data {

static_assert(std::endian::native == std::endian::little, "token files are written as numbers lie in memory");

namespace {

constexpr uint32_t version = 1;
constexpr uint64_t no_document_end = std::numeric_limits<uint64_t>::max();
constexpr const char* make_again = "; copy the file again, or make it again with tesserae tokenize";

template <class Number>
void put(std::string& bytes, Number value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class Number>
Number get(std::string_view bytes, size_t offset) {
  Number value;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

[[noreturn]] void none(const os::Path& path) {
  throw InvalidArgument("TokenFile", cat(path.string(), " does not begin as a token file; tokens without a header are ",
                                         "of format uint16 or uint32, and tesserae tokenize writes token files"));
}

}  // namespace

std::string token_header(const TokenFileInfo& info) {
  std::string bytes(token_magic);
  put(bytes, version);
  put(bytes, static_cast<uint32_t>(info.bytes_per_token));
  put(bytes, static_cast<uint64_t>(info.vocabulary));
  put(bytes, info.document_end ? static_cast<uint64_t>(*info.document_end) : no_document_end);
  put(bytes, static_cast<uint32_t>(token_block_bytes));
  bytes.resize(token_header_bytes - sizeof(uint64_t));
  put(bytes, checksum(bytes));
  return bytes;
}

std::string token_footer(std::string_view header, int64_t tokens, uint64_t sum_of_sums) {
  std::string bytes;
  put(bytes, static_cast<uint64_t>(tokens));
  put(bytes, sum_of_sums);
  put(bytes, checksum(std::string(header) + bytes));
  bytes += token_end_magic;
  return bytes;
}

std::pair<TokenFileInfo, uint64_t> parse_token_file(const os::Path& path, std::string_view header,
                                                    std::string_view footer, uint64_t size) {
  const auto damaged = [&](uint64_t begin, uint64_t end, const std::string& what) {
    return Corruption("TokenFile",
                      cat(path.string(), ": ", what, " (bytes ", begin, " to ", end, " of ", size, ")", make_again));
  };
  const bool begins = header.starts_with(token_magic), ends = footer.ends_with(token_end_magic);
  if (!begins && !ends) none(path);
  if (size < token_header_bytes + token_footer_bytes) {
    throw damaged(0, size, "it is cut short: header and footer alone take 96 bytes");
  }
  const size_t sum_at = token_header_bytes - sizeof(uint64_t);
  if (!begins || checksum(header.substr(0, sum_at)) != get<uint64_t>(header, sum_at)) {
    throw damaged(0, token_header_bytes, "its header has changed");
  }
  if (const auto found = get<uint32_t>(header, 8); found != version) {
    throw InvalidArgument("TokenFile", cat(path.string(), " is of version ", found, " of the format; this program ",
                                           "reads version ", version));
  }
  TokenFileInfo info{.bytes_per_token = static_cast<int>(get<uint32_t>(header, 12)),
                     .vocabulary = get<int64_t>(header, 16),
                     .document_end = std::nullopt,
                     .tokens = get<int64_t>(footer, 0)};
  if (const auto end = get<uint64_t>(header, 24); end != no_document_end) info.document_end = static_cast<int64_t>(end);
  const uint64_t footer_at = size - token_footer_bytes;
  if (!ends || checksum(std::string(header) + std::string(footer.substr(0, 16))) != get<uint64_t>(footer, 16)) {
    throw damaged(footer_at, size, "it is cut short, or its footer has changed");
  }
  const uint64_t data = info.data_bytes();
  const uint64_t whole = token_header_bytes + data + token_blocks(data) * sizeof(uint64_t) + token_footer_bytes;
  if (whole != size) throw damaged(token_header_bytes, footer_at, cat("it was written with ", whole, " bytes"));
  return {info, get<uint64_t>(footer, 8)};
}

}  // namespace tesserae::data
