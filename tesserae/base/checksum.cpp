#include "tesserae/base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tesserae {

uint64_t checksum(std::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t checksum_of_blocks(const std::vector<uint64_t>& blocks) {
  std::string bytes;
  bytes.reserve(blocks.size() * 8);
  for (const uint64_t block : blocks) {
    for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(block >> shift));
  }
  return checksum(bytes);
}

std::string to_hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

std::optional<uint64_t> from_hex(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  return value;
}

}  // namespace tesserae
