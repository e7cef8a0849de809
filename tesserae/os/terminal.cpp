#include "tesserae/os/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tesserae::os {

bool is_terminal(Stream stream) {
  const char* kind = std::getenv("TERM");
  return ::isatty(static_cast<int>(stream)) == 1 && kind != nullptr && std::string_view(kind) != "dumb";
}

int columns(Stream stream) {
  winsize size{};
  const bool known = ::ioctl(static_cast<int>(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

}  // namespace tesserae::os
