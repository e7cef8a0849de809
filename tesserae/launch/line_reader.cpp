#include "tesserae/launch/line_reader.h"

#include <utility>

namespace tesserae::launch {
namespace {

constexpr size_t longest_line = 1 << 20;  // a rank that writes no line ends must not fill the memory

std::string last_part(std::string line) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  const size_t at = line.rfind('\r');
  return at == std::string::npos ? line : line.substr(at + 1);
}

}  // namespace

std::vector<std::string> LineReader::add(std::string_view bytes) {
  std::vector<std::string> lines;
  for (const char byte : bytes) {
    if (byte != '\n') begun_ += byte;
    if (byte == '\n' || begun_.size() >= longest_line) lines.push_back(last_part(std::exchange(begun_, {})));
  }
  return lines;
}

std::vector<std::string> LineReader::rest() {
  if (begun_.empty()) return {};
  return {last_part(std::exchange(begun_, {}))};
}

}  // namespace tesserae::launch
