#include "tesserae/config/keys.h"

#include <algorithm>
#include <sstream>

#include "tesserae/config/schema.h"

namespace tesserae::config {
namespace {

std::string describe_name(const std::string& type) {
  if (type == "integer") return "an integer";
  if (type == "number") return "a number";
  if (type == "string") return "text";
  if (type == "boolean") return "true or false";
  if (type == "array") return "a list";
  if (type == "object") return "an object";
  return "null";
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string joined;
  for (const auto& part : parts) joined += (joined.empty() ? "" : separator) + part;
  return joined;
}

std::string describe_default(const Json& schema, bool required) {
  if (schema.contains("x-default")) return schema["x-default"].get<std::string>();
  if (schema.contains("default")) return schema["default"].dump();
  return required ? "required" : "";
}

// The keys of an object may stand in one of several alternatives (precision).
const Json* properties_of(const Json& schema) {
  if (schema.contains("properties")) return &schema["properties"];
  if (schema.contains("anyOf")) {
    for (const auto& alternative : schema["anyOf"]) {
      if (alternative.contains("properties")) return &alternative["properties"];
    }
  }
  return nullptr;
}

bool requires_key(const Json& schema, const std::string& name) {
  if (!schema.contains("required")) return false;
  const Json& required = schema["required"];
  return std::find(required.begin(), required.end(), name) != required.end();
}

void collect(const Json& schema, const std::string& prefix, std::vector<Key>& keys) {
  const Json* properties = properties_of(schema);
  if (properties == nullptr) return;
  for (const auto& [name, property] : properties->items()) {
    Key key;
    key.path = prefix + name;
    key.section = properties_of(property) != nullptr;
    key.type = describe_type(property);
    key.unit = property.value("x-unit", "");
    key.default_value = describe_default(property, requires_key(schema, name));
    key.description = property.at("description").get<std::string>();
    keys.push_back(key);
    collect(property, key.path + ".", keys);
  }
}

// Greedy line filling: `text` in lines of at most `width` characters, each after `indent` blanks.
void fill(std::ostream& out, const std::string& text, int indent, int width) {
  std::istringstream words(text);
  std::string word;
  int column = 0;
  while (words >> word) {
    const int length = static_cast<int>(word.size());
    if (column == 0 || column + 1 + length > width) {
      out << (column == 0 ? "" : "\n") << std::string(indent, ' ') << word;
      column = indent + length;
    } else {
      out << ' ' << word;
      column += 1 + length;
    }
  }
  out << '\n';
}

std::string for_table(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = [] {
    std::vector<Key> list;
    collect(config_schema(), "", list);
    return list;
  }();
  return keys;
}

std::string describe_type(const Json& schema) {
  std::vector<std::string> parts;
  if (schema.contains("anyOf")) {
    for (const auto& alternative : schema["anyOf"]) parts.push_back(describe_type(alternative));
    return join(parts, " or ");
  }
  if (schema.contains("enum")) {
    for (const auto& value : schema["enum"]) parts.push_back(value.dump());
    return parts.size() == 1 ? parts[0] : "one of " + join(parts, ", ");
  }
  const Json& type = schema.at("type");
  if (type.is_string()) return describe_name(type.get<std::string>());
  for (const auto& one : type) parts.push_back(describe_name(one.get<std::string>()));
  return join(parts, " or ");
}

std::string keys_as_text(int width, const std::string& under) {
  std::ostringstream out;
  for (const Key& key : config_keys()) {
    if (!key.path.starts_with(under)) continue;
    if (key.default_value.empty()) {
      out << key.path << '\n';
    } else {
      out << key.path << " = " << key.default_value << '\n';
      fill(out, key.type + (key.unit.empty() ? "" : ", in " + key.unit) + ".", 4, width);
    }
    fill(out, key.description, 4, width);
  }
  return out.str();
}

std::string keys_as_markdown() {
  std::ostringstream out;
  out << R"(# Configuration

<!-- Made from tesserae/config/schema.json by `tesserae config --markdown`: change that file, not this one. -->

`tesserae train CONFIG.json` reads one JSON file (`//` comments are allowed); `--set KEY=VALUE` changes one key, for
example `--set train.steps=50`. VALUE is parsed as JSON; what is not valid JSON is taken as text. Every key has a default,
except `data.path`, and the three keys of `degrees` where that section is given. A key that is not listed here is an
error. Paths are relative to the current folder.

Except `context_parallel_method`, `memory_limit` and `$comment`, the keys before the first section are those of the
SageMaker model parallelism library v2, with its defaults (`activation_loading_horizon`: see
[from SMP v2](from-smp.md#the-keys)). A script takes [some of these keys](python.md#configuration).

| key | type | default | meaning |
|---|---|---|---|
)";
  for (const Key& key : config_keys()) {
    if (key.section) {
      out << "\n## " << key.path << "\n\n" << key.description << "\n";
      if (!key.default_value.empty()) out << "It is " << key.type << "; default: " << key.default_value << ".\n";
      out << "\n| key | type | default | meaning |\n|---|---|---|---|\n";
      continue;
    }
    const std::string type = key.type + (key.unit.empty() ? "" : ", in " + key.unit);
    out << "| `" << key.path << "` | " << for_table(type) << " | " << for_table(key.default_value) << " | "
        << for_table(key.description) << " |\n";
  }
  return out.str();
}

}  // namespace tesserae::config
