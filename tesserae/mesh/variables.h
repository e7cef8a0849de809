#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tesserae/mesh/launch.h"

namespace tesserae::mesh {

/// The environment with typed reads. An empty variable counts as unset, as it does for every launcher. Errors are
/// InvalidArgument of World::from_environment, through which all of it is read. `lookup` outlives it.
class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  std::string text(const char* name) const;
  bool has(const char* name) const { return !text(name).empty(); }
  /// Throws if it is not set ("`launcher` started this process, but ...") or is no integer.
  int number(const char* name, std::string_view launcher) const;
  /// The same of a port.
  uint16_t port(const char* name) const;

 private:
  const Lookup& lookup_;
};

[[noreturn]] void fail_launch(const std::string& message);

}  // namespace tesserae::mesh
