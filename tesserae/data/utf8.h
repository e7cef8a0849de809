#pragma once

#include <cstddef>
#include <string_view>

namespace tesserae::data {

/// True if `bytes` is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
bool is_utf8(std::string_view bytes);

/// How many bytes at the end of a block of text are the beginning of a character that goes on in the next block: 0
/// to 3.
size_t broken_off(std::string_view block);

}  // namespace tesserae::data
