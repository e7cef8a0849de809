#pragma once

#include <nlohmann/json.hpp>

#include "tesserae/mesh/split.h"

namespace tesserae::checkpoint {

/// Splits as docs/format.md has them, without indices: {"dim":1,"parts":4,"blocks":1}, with "axis" where that is not
/// tensor, and "then" with the second one if there is one. Of splits that do cut.
nlohmann::ordered_json json_of(const mesh::Splits& splits);

/// The inverse, for text that this program wrote itself. Throws nlohmann::json::exception or InvalidArgument.
mesh::Splits splits_from(const nlohmann::json& json);

/// The axis of that name. Throws InvalidArgument naming those that there are.
mesh::Axis axis_named(std::string_view name);

}  // namespace tesserae::checkpoint
