#pragma once

#include <string>
#include <vector>

#include "tesserae/config/json.h"

namespace tesserae::config {

/// The JSON object in that file, unchecked. // and /* */ comments are skipped; a key that stands twice in one object is
/// an error. Throws ConfigError naming the file, and the line for text that is no JSON.
Json read_config_file(const std::string& path);

/// Applies one `--set`: "train.steps=50". The value is read as JSON, and as text where it is no JSON. Sections are made
/// where they lack. Throws ConfigError for an assignment without a key or without '='.
void set_key(Json& document, const std::string& assignment);

/// Reads the file, applies the assignments in order, validates: the resolved document, every key present.
Json resolve_config(const std::string& path, const std::vector<std::string>& assignments);

}  // namespace tesserae::config
