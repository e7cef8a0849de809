#include "tesserae/mesh/variables.h"

#include <charconv>

#include "tesserae/base/error.h"

namespace tesserae::mesh {

void fail_launch(const std::string& message) {
  throw InvalidArgument("World::from_environment", message);
}

std::string Variables::text(const char* name) const {
  const char* value = lookup_(name);
  return value == nullptr ? std::string() : std::string(value);
}

int Variables::number(const char* name, std::string_view launcher) const {
  const std::string value = text(name);
  if (value.empty()) fail_launch(cat(launcher, " started this process, but ", name, " is not set"));
  int parsed = 0;
  const char* const end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, parsed);
  if (error != std::errc() || stop != end) fail_launch(cat(name, "=", value, " is not a number that fits"));
  return parsed;
}

uint16_t Variables::port(const char* name) const {
  const int port = number(name, "a launcher");
  if (port < 1 || port > 65535) fail_launch(cat(name, "=", port, " is no port: it must be in [1, 65535]"));
  return static_cast<uint16_t>(port);
}

}  // namespace tesserae::mesh
