#pragma once

#include <map>
#include <string>

#include "tesserae/base/error.h"
#include "tesserae/mesh/launch.h"

namespace tesserae::mesh {

/// Variables of a process, for what reads them through a Lookup.
using Environment = std::map<std::string, std::string>;

inline Lookup lookup_in(const Environment& environment) {
  return [&environment](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}

/// `environment` with some variables replaced; an empty value counts as unset.
inline Environment with(Environment environment, const Environment& changes) {
  for (const auto& [name, value] : changes) environment[name] = value;
  return environment;
}

}  // namespace tesserae::mesh
