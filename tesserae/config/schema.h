#pragma once

#include "tesserae/config/json.h"

namespace tesserae::config {

/// tesserae/config/schema.json, the one source of keys, types, ranges, defaults and descriptions (JSON schema draft
/// 2020-12). Two keywords are ours: "x-unit" names the unit of a number, "x-default" says in words what a default of
/// null means.
const Json& config_schema();

}  // namespace tesserae::config
