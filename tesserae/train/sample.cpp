#include "tesserae/train/sample.h"

namespace tesserae::train {
namespace {

/// How many bytes the UTF-8 sequence that starts at `at` has; 0 if there is none.
size_t sequence_length(const std::vector<int64_t>& tokens, size_t at) {
  const int64_t lead = tokens[at];
  const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || at + length > tokens.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (tokens[at + i] < 0x80 || tokens[at + i] > 0xBF) return 0;
  }
  // Overlong forms, surrogates and code points above 0x10FFFF are no UTF-8 either.
  const int64_t next = length > 1 ? tokens[at + 1] : 0;
  if ((lead == 0xE0 && next < 0xA0) || (lead == 0xED && next > 0x9F)) return 0;
  if ((lead == 0xF0 && next < 0x90) || (lead == 0xF4 && next > 0x8F)) return 0;
  return length;
}

bool shown(int64_t byte) {
  return byte == '\n' || byte == '\t' || (byte >= 0x20 && byte != 0x7F);
}

}  // namespace

std::string printable(const std::vector<int64_t>& tokens) {
  std::string text;
  for (size_t at = 0; at < tokens.size();) {
    if (tokens[at] < 0 || tokens[at] > 255) {
      text += '\n';
      ++at;
      continue;
    }
    const size_t length = sequence_length(tokens, at);
    // U+0080 to U+009F are control characters, too: some terminals take them for the start of a command.
    const bool control = length == 2 && tokens[at] == 0xC2 && tokens[at + 1] < 0xA0;
    if (length == 0) {
      text += "\uFFFD";
    } else if (!control && (length > 1 || shown(tokens[at]))) {
      for (size_t i = 0; i < length; ++i) text += static_cast<char>(tokens[at + i]);
    }
    at += length == 0 ? 1 : length;
  }
  return text;
}

}  // namespace tesserae::train
