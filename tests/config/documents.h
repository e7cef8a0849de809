#pragma once

#include <string>

#include "tesserae/config/config.h"
#include "tesserae/config/config_file.h"
#include "tesserae/config/schema.h"
#include "tesserae/config/validate.h"

namespace tesserae::config {

/// The configuration that `text` is, as if it stood in the file "job.json".
inline Config config_of(const std::string& text) {
  return make_config(validate(config_schema(), Json::parse(text)), "job.json");
}

/// The text of the ConfigError that `body` throws; "no error" if it throws none.
template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace tesserae::config
