#include "tesserae/config/validate.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

#include "tesserae/base/nearest.h"
#include "tesserae/config/keys.h"

namespace tesserae::config {
namespace {

// A keyword that the walker does not know would be a rule that silently does not hold.
void check_keywords(const Json& schema) {
  static const std::set<std::string> known = {
      "type",      "enum",  "anyOf",    "minimum",  "maximum",    "exclusiveMinimum", "exclusiveMaximum",
      "minLength", "items", "minItems", "maxItems", "properties", "required",         "additionalProperties",
      "default",   "title", "$schema",  "x-unit",   "x-default",  "description"};
  for (const auto& [keyword, unused] : schema.items()) {
    if (!known.contains(keyword)) throw std::logic_error("schema.json: unsupported keyword " + keyword);
  }
}

bool is_whole(const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>() <= INT64_MAX;
  if (value.is_number_integer()) return true;
  if (!value.is_number_float()) return false;
  const double number = value.get<double>();
  return std::abs(number) < 9e15 && std::trunc(number) == number;  // 1e3 is an integer to JSON schema
}

bool has_type(const Json& value, const std::string& type) {
  if (type == "integer") return is_whole(value);
  if (type == "number") return value.is_number();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  return value.is_null();
}

bool matches_type(const Json& schema, const Json& value) {
  if (!schema.contains("type")) return true;
  const Json& type = schema["type"];
  if (type.is_string()) return has_type(value, type.get<std::string>());
  for (const auto& one : type) {
    if (has_type(value, one.get<std::string>())) return true;
  }
  return false;
}

bool wants_integer(const Json& schema) {
  const Json type = schema.value("type", Json());
  return type == "integer" || (type.is_array() && type[0] == "integer");
}

[[noreturn]] void fail(const std::string& key, const std::string& message) {
  throw ConfigError(key, message);
}

Json walk(const Json& schema, const Json& value, const std::string& key);

Json walk_alternatives(const Json& schema, const Json& value, const std::string& key) {
  for (const auto& alternative : schema["anyOf"]) {
    try {
      return walk(alternative, value, key);
    } catch (const ConfigError&) {
      // A value of the alternative's type is meant for it: its error says more than "neither of these".
      const bool meant = alternative.contains("type") && matches_type(alternative, value);
      if (meant) throw;
    }
  }
  fail(key, cat("must be ", describe_type(schema), ", but is ", brief(value)));
}

void check_number(const Json& schema, const Json& value, const std::string& key) {
  const double number = value.get<double>();
  const auto require = [&](const char* keyword, const char* words, auto holds) {
    if (schema.contains(keyword) && !holds(number, schema[keyword].get<double>())) {
      fail(key, cat("must be ", words, " ", schema[keyword].dump(), ", but is ", brief(value)));
    }
  };
  require("minimum", "at least", [](double a, double b) { return a >= b; });
  require("maximum", "at most", [](double a, double b) { return a <= b; });
  require("exclusiveMinimum", "more than", [](double a, double b) { return a > b; });
  require("exclusiveMaximum", "less than", [](double a, double b) { return a < b; });
}

Json walk_array(const Json& schema, const Json& value, const std::string& key) {
  const size_t least = schema.value("minItems", size_t{0});
  const size_t most = schema.value("maxItems", value.size());
  if (value.size() < least || value.size() > most) {
    const std::string wanted = least == most          ? cat(least)
                               : value.size() < least ? cat("at least ", least)
                                                      : cat("at most ", most);
    fail(key, cat("must have ", wanted, least == 1 ? " entry" : " entries", ", but is ", brief(value)));
  }
  Json result = Json::array();
  for (size_t i = 0; i < value.size(); ++i) {
    result.push_back(schema.contains("items") ? walk(schema["items"], value[i], cat(key, "[", i, "]")) : value[i]);
  }
  return result;
}

[[noreturn]] void fail_unknown(const Json& properties, const std::string& name, const std::string& path) {
  // A key in the wrong section is as common as a misspelt one.
  for (const Key& key : config_keys()) {
    if (key.path.ends_with("." + name)) fail(path, cat("unknown key; did you mean ", key.path, "?"));
  }
  std::vector<std::string> siblings;
  for (const auto& [sibling, unused] : properties.items()) siblings.push_back(sibling);
  const std::string section = path.substr(0, path.size() - name.size());
  fail(path, cat("unknown key; did you mean ", section, nearest(name, siblings), "?"));
}

Json walk_object(const Json& schema, const Json& value, const std::string& key) {
  const Json& properties = schema["properties"];
  const auto path = [&](const std::string& name) { return key.empty() ? name : key + "." + name; };
  for (const auto& [name, unused] : value.items()) {
    if (!properties.contains(name)) fail_unknown(properties, name, path(name));
  }
  for (const auto& name : schema.value("required", Json::array())) {
    const std::string missing = name.get<std::string>();
    // A missing section is reported as the key in it that is needed, below.
    if (!value.contains(missing) && !properties[missing].contains("properties")) {
      fail(path(missing), cat("is missing; it must be ", describe_type(properties[missing])));
    }
  }
  Json result = Json::object();
  for (const auto& [name, property] : properties.items()) {
    if (value.contains(name)) {
      result[name] = walk(property, value[name], path(name));
    } else if (property.contains("default")) {
      result[name] = property["default"];
    } else if (property.contains("properties")) {
      result[name] = walk(property, Json::object(), path(name));
    }
  }
  return result;
}

Json walk(const Json& schema, const Json& value, const std::string& key) {
  check_keywords(schema);
  if (schema.contains("anyOf")) return walk_alternatives(schema, value, key);
  if (!matches_type(schema, value)) fail(key, cat("must be ", describe_type(schema), ", but is ", brief(value)));
  if (schema.contains("enum")) {
    for (const auto& allowed : schema["enum"]) {
      if (allowed == value) return value;
    }
    std::string hint;
    if (value.is_string()) {
      std::vector<std::string> names;
      for (const auto& allowed : schema["enum"]) {
        if (allowed.is_string()) names.push_back(allowed.get<std::string>());
      }
      const std::string close = nearest(value.get<std::string>(), names);
      if (edit_distance(close, value.get<std::string>()) <= 2) hint = cat("; did you mean \"", close, "\"?");
    }
    fail(key, cat("must be ", describe_type(schema), ", but is ", brief(value), hint));
  }
  if (value.is_number()) {
    check_number(schema, value, key);
    if (value.is_number_float() && wants_integer(schema)) return value.get<int64_t>();
  }
  if (value.is_string() && value.get<std::string>().size() < schema.value("minLength", size_t{0})) {
    fail(key, "must not be empty");
  }
  if (value.is_array()) return walk_array(schema, value, key);
  if (value.is_object()) return walk_object(schema, value, key);
  return value;
}

}  // namespace

Json validate(const Json& schema, const Json& document) {
  if (!document.is_object()) throw ConfigError("", cat("must be a JSON object, but is ", brief(document)));
  return walk(schema, document, "");
}

}  // namespace tesserae::config
