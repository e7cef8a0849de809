#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tesserae::train {

/// Tokens of byte text as text that a terminal can show: bytes that are no UTF-8 become U+FFFD, control characters
/// other than line ends and tabs are left out, tokens above 255 (end of a file) become a line end.
std::string printable(const std::vector<int64_t>& tokens);

}  // namespace tesserae::train
