#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tesserae/data/token_file.h"

namespace tesserae::data {

// The bytes of a token file: header, tokens, the checksum of each block of tokens, footer. What only the end of writing
// tells is in the footer, so that a file is written from its first byte to its last (docs/format.md).

inline constexpr uint64_t token_header_bytes = 64;
inline constexpr uint64_t token_footer_bytes = 32;
/// A sample of random order reads one or two blocks at first, so they are small; their checksums take 1/8192.
inline constexpr uint64_t token_block_bytes = uint64_t{1} << 16;
inline constexpr std::string_view token_magic = "TSRTOKEN";
inline constexpr std::string_view token_end_magic = "NEKOTRST";

inline uint64_t token_blocks(uint64_t data_bytes) {
  return (data_bytes + token_block_bytes - 1) / token_block_bytes;
}

std::string token_header(const TokenFileInfo& info);
/// `sum_of_sums`: checksum_of_blocks() of the checksums of the blocks.
std::string token_footer(std::string_view header, int64_t tokens, uint64_t sum_of_sums);

/// What header and footer of a file of `size` bytes say; also the checksum of the blocks' checksums. Throws as the
/// constructor of TokenFile does.
std::pair<TokenFileInfo, uint64_t> parse_token_file(const os::Path& path, std::string_view header,
                                                    std::string_view footer, uint64_t size);

}  // namespace tesserae::data
