#include "tesserae/checkpoint/names.h"

#include <algorithm>

namespace tesserae::checkpoint {

std::string tensor_name_defect(std::string_view name) {
  if (name.empty()) return "the name is empty";
  if (name.front() == '/') return "the name begins with a slash";
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return "the name has a control character";
  }
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return "the name has a component \"..\"";
    begin = end + 1;
  }
  return {};
}

std::string file_name_defect(std::string_view name) {
  constexpr std::string_view allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  if (name.empty() || name.size() > 200) return "the name is empty or longer than 200 characters";
  if (name.front() == '.') return "the name begins with a dot";
  if (name.find_first_not_of(allowed) != std::string_view::npos) return "the name has a character that is not allowed";
  return {};
}

}  // namespace tesserae::checkpoint
