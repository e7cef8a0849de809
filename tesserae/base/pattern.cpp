#include "tesserae/base/pattern.h"

#include <cstddef>

namespace tesserae {

// Where the rest does not fit, the last `*` takes one character more and all after it is tried again.
bool matches(std::string_view pattern, std::string_view name) {
  size_t at = 0, read = 0, star = std::string_view::npos, taken = 0;
  while (read < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      taken = read;
    } else if (at < pattern.size() && pattern[at] == name[read]) {
      ++at;
      ++read;
    } else if (star != std::string_view::npos) {
      at = star + 1;
      read = ++taken;
    } else {
      return false;
    }
  }
  while (at < pattern.size() && pattern[at] == '*') ++at;
  return at == pattern.size();
}

}  // namespace tesserae
