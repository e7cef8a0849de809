#pragma once

#include "tesserae/config/json.h"

namespace tesserae::config {

/// The part of the schema that a script's `tsm.init` takes: SMP v2's nine keys, `degrees`, `wire`, `dial`, `$comment`,
/// of `run` the folder and the deadlines, and `cpu_bf16_products`, which is of scripts only.
const Json& init_config_schema();

/// `document`, a configuration of `tsm.init`, checked and with every default filled in. Throws ConfigError for what
/// `validate` refuses, for keys that only `tesserae train` reads, for keys that contradict each other and for features
/// that are not available yet.
Json validate_init_config(const Json& document);

}  // namespace tesserae::config
