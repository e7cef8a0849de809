#include "tesserae/data/token_file.h"

#include <algorithm>
#include <cstring>

#include "tesserae/base/checksum.h"
#include "tesserae/base/error.h"
#include "tesserae/data/token_format.h"

namespace tesserae::data {

bool begins_as_token_file(const os::Path& path) {
  std::string begin(token_magic.size(), '\0');
  return os::files().open(path)->read_at(0, begin) == begin.size() && begin == token_magic;
}

TokenFile::TokenFile(os::Path path) : path_(std::move(path)), size_(os::files().status(path_).size) {
  const auto file = os::files().open(path_);
  std::string header(token_header_bytes, '\0'), footer(token_footer_bytes, '\0');
  header.resize(file->read_at(0, header));
  const uint64_t footer_at = size_ < token_footer_bytes ? 0 : size_ - token_footer_bytes;
  footer.resize(file->read_at(footer_at, footer));
  std::tie(info_, sum_of_sums_) = parse_token_file(path_, header, footer, size_);
  good_.resize(blocks());
}

uint64_t TokenFile::blocks() const {
  return token_blocks(info_.data_bytes());
}

void TokenFile::read_exactly(os::ReadableFile& file, uint64_t offset, std::span<char> bytes) const {
  const size_t found = file.read_at(offset, bytes);
  if (found == bytes.size()) return;
  throw Corruption("TokenFile", cat(path_.string(), " had ", size_, " bytes and now ends at ", offset + found,
                                    "; data must not change while it is read"));
}

void TokenFile::read(os::ReadableFile& file, int64_t begin, int64_t count, std::string& bytes) {
  const auto width = static_cast<uint64_t>(info_.bytes_per_token);
  const uint64_t from = static_cast<uint64_t>(begin) * width, to = from + static_cast<uint64_t>(count) * width;
  const uint64_t first = from / token_block_bytes, last = token_blocks(to);
  const auto of = [&](uint64_t block) { return good_.begin() + static_cast<std::ptrdiff_t>(block); };
  if (std::all_of(of(first), of(last), [](bool good) { return good; })) {
    bytes.resize(to - from);
    return read_exactly(file, token_header_bytes + from, bytes);
  }
  const uint64_t whole_from = first * token_block_bytes;
  bytes.resize(std::min(last * token_block_bytes, info_.data_bytes()) - whole_from);
  read_exactly(file, token_header_bytes + whole_from, bytes);
  compare(file, first, last, bytes);
  bytes.resize(to - whole_from);
  bytes.erase(0, from - whole_from);
}

void TokenFile::compare(os::ReadableFile& file, uint64_t first, uint64_t last, std::string_view bytes) {
  std::vector<uint64_t> sums(last - first);
  const uint64_t sums_at = token_header_bytes + info_.data_bytes() + first * sizeof(uint64_t);
  read_exactly(file, sums_at, {reinterpret_cast<char*>(sums.data()), sums.size() * sizeof(uint64_t)});
  for (uint64_t block = first; block < last; ++block) {
    const std::string_view content = bytes.substr((block - first) * token_block_bytes, token_block_bytes);
    if (checksum(content) != sums[block - first]) {
      const uint64_t offset = token_header_bytes + block * token_block_bytes;
      const uint64_t sum_at = token_header_bytes + info_.data_bytes() + block * sizeof(uint64_t);
      throw Corruption("TokenFile",
                       cat(path_.string(), ": bytes ", offset, " to ", offset + content.size(), " (tokens ",
                           block * token_block_bytes / static_cast<uint64_t>(info_.bytes_per_token),
                           " on), or their checksum at byte ", sum_at, ", have changed since they were ",
                           "written; copy the file again, or make it again with tesserae tokenize"));
    }
    good_[block] = true;
  }
}

void TokenFile::verify(const std::function<void(uint64_t bytes)>& progress) {
  const auto file = os::files().open(path_);
  std::string bytes;
  std::vector<uint64_t> sums;
  constexpr uint64_t at_once = 64;  // blocks
  for (uint64_t first = 0; first < blocks(); first += at_once) {
    const uint64_t last = std::min(first + at_once, blocks()), offset = first * token_block_bytes;
    bytes.resize(std::min(last * token_block_bytes, info_.data_bytes()) - offset);
    read_exactly(*file, token_header_bytes + offset, bytes);
    compare(*file, first, last, bytes);
    check_vocabulary(offset, bytes);
    for (uint64_t at = 0; at < bytes.size(); at += token_block_bytes) {
      sums.push_back(checksum(std::string_view(bytes).substr(at, token_block_bytes)));
    }
    if (progress) progress(offset + bytes.size());
  }
  if (checksum_of_blocks(sums) == sum_of_sums_) return;
  throw Corruption("TokenFile", cat(path_.string(), ": blocks and their checksums fit each other, but not the footer; ",
                                    "the file was put together from several"));
}

void TokenFile::check_vocabulary(uint64_t offset, std::string_view bytes) const {
  const auto width = static_cast<size_t>(info_.bytes_per_token);
  for (size_t at = 0; at < bytes.size(); at += width) {
    uint32_t token = 0;
    std::memcpy(&token, bytes.data() + at, width);
    if (static_cast<int64_t>(token) < info_.vocabulary) continue;
    throw Corruption("TokenFile", cat(path_.string(), " has token ", token, " at byte ",
                                      token_header_bytes + offset + at, "; its vocabulary is ", info_.vocabulary));
  }
}

}  // namespace tesserae::data
