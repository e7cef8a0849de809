#pragma once

#include <string>
#include <vector>

#include "tesserae/config/json.h"

namespace tesserae::config {

/// What the schema says of one key, ready to print.
struct Key {
  std::string path;           ///< "train.steps"; a section has one too
  bool section = false;       ///< holds other keys, which follow it
  std::string type;           ///< "an integer", "one of \"adamw\", \"sgd\""
  std::string unit;           ///< "steps"; may be empty
  std::string default_value;  ///< "100", or in words; "required" if it must be given; empty for a plain section
  std::string description;
};

/// All keys in the schema's order.
const std::vector<Key>& config_keys();

/// The type that a schema node asks for, in words.
std::string describe_type(const Json& schema);

/// One paragraph a key, for a terminal `width` characters wide. With `under` not empty: only keys whose path begins so.
std::string keys_as_text(int width, const std::string& under = "");

/// The page docs/configuration.md.
std::string keys_as_markdown();

}  // namespace tesserae::config
