#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tesserae {

/// XXH3 with 64 bits and seed 0.
uint64_t checksum(std::string_view bytes);

/// The checksum of a file from those of its blocks: XXH3 of them, each as 8 little-endian bytes.
uint64_t checksum_of_blocks(const std::vector<uint64_t>& blocks);

/// 16 lower-case hexadecimal digits, and back; nothing unless it is exactly that.
std::string to_hex(uint64_t value);
std::optional<uint64_t> from_hex(std::string_view text);

}  // namespace tesserae
