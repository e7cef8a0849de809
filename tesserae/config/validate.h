#pragma once

#include <string>

#include "tesserae/config/json.h"

namespace tesserae::config {

/// `document` checked against `schema`, every key that it lacks filled with its default, keys in the schema's order.
///
/// Throws ConfigError for the first key that is wrong: unknown (naming the nearest known one), missing, of a wrong
/// type, out of range. Understands what tesserae/config/schema.json uses of JSON schema: type, enum, anyOf, minimum,
/// maximum, exclusiveMinimum, exclusiveMaximum, minLength, items, minItems, maxItems, properties, required, default,
/// and additionalProperties: false; throws std::logic_error for a schema that says anything else.
Json validate(const Json& schema, const Json& document);

}  // namespace tesserae::config
