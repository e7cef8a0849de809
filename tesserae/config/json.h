#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tesserae/base/error.h"

namespace tesserae::config {

/// Keeps keys in the order in which they were written, so that a resolved configuration reads like the schema.
using Json = nlohmann::ordered_json;

/// A configuration that cannot work. The text is one line: "[configuration] train.steps: what is wrong, the value".
/// The command line ends with exit status 2.
class ConfigError : public InvalidArgument {
 public:
  /// `key`: the path of a key, "train.steps" or "data.path[1]"; empty: the configuration as a whole.
  ConfigError(const std::string& key, const std::string& message)
      : InvalidArgument("configuration", key.empty() ? message : cat(key, ": ", message)) {}
};

/// `value` on one line, cut after 60 characters: for error texts.
std::string brief(const Json& value);

/// The text of an error without its "[function] ": for use in another error's text.
std::string without_function(const Error& error);

}  // namespace tesserae::config
