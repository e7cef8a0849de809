#include "tesserae/config/config_file.h"

#include <set>

#include "tesserae/config/schema.h"
#include "tesserae/config/validate.h"
#include "tesserae/os/files.h"

namespace tesserae::config {
namespace {

std::string read_text(const std::string& path) {
  try {
    return os::files().read(path);
  } catch (const IoError& error) {
    throw ConfigError("", without_function(error));
  }
}

std::string place(const std::string& text, size_t byte) {
  size_t line = 1, column = 1;
  for (size_t i = 0; i + 1 < byte && i < text.size(); ++i) {
    column = text[i] == '\n' ? 1 : column + 1;
    line += text[i] == '\n';
  }
  return cat(line, ":", column);
}

// The library's own text is "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ...".
// That of a number is "[json.exception.out_of_range.406] number overflow parsing '1e999'".
std::string reason(const Json::exception& error) {
  const std::string text = error.what();
  const size_t at = text.find(text.find("parse error") == std::string::npos ? "] " : ": ");
  return at == std::string::npos ? text : text.substr(at + 2);
}

/// What a name of precision stands for, as the object that keys within it change: "precision.reduce=fp32" over "bf16"
/// goes on computing in bf16.
Json dtypes_of(const Json& name, const std::string& assignment) {
  if (name == "bf16") return {{"parameters", "bf16"}, {"reduce", "fp32"}, {"masters", "fp32"}};
  if (name == "fp16") return {{"parameters", "fp16"}, {"reduce", "fp16"}, {"masters", "fp32"}};
  if (name != "auto" || assignment.starts_with("precision.parameters=")) return Json::object();
  throw ConfigError("precision", cat("is auto, so that \"", assignment, "\" leaves open what is computed in: name ",
                                     "that first (--set precision=bf16)"));
}

}  // namespace

Json read_config_file(const std::string& path) {
  const std::string text = read_text(path);
  std::vector<std::set<std::string>> seen;
  const auto watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) seen.emplace_back();
    if (event == Json::parse_event_t::object_end) seen.pop_back();
    if (event == Json::parse_event_t::key && !seen.back().insert(parsed.get<std::string>()).second) {
      throw ConfigError("", cat(path, ": the key ", brief(parsed), " stands twice in one object"));
    }
    return true;
  };
  try {
    Json document = Json::parse(text, watch, true, true);
    if (!document.is_object()) throw ConfigError("", cat(path, ": must be a JSON object, but is ", brief(document)));
    return document;
  } catch (const Json::parse_error& error) {
    throw ConfigError("", cat(path, ":", place(text, error.byte), ": no valid JSON: ", reason(error)));
  } catch (const Json::out_of_range& error) {  // a number that no double holds
    throw ConfigError("", cat(path, ": ", reason(error)));
  }
}

void set_key(Json& document, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  const std::string path = assignment.substr(0, equals);
  if (equals == std::string::npos || path.empty() || path.front() == '.' || path.back() == '.' ||
      path.find("..") != std::string::npos) {
    throw ConfigError("", cat("--set takes KEY=VALUE, for example train.steps=50, but got \"", assignment, "\""));
  }
  const std::string text = assignment.substr(equals + 1);
  Json value = Json::parse(text, nullptr, false);
  if (value.is_discarded()) value = text;

  Json* node = &document;
  size_t begin = 0;
  for (size_t dot; (dot = path.find('.', begin)) != std::string::npos; begin = dot + 1) {
    node = &(*node)[path.substr(begin, dot - begin)];
    // Over what is no object the key asked for last wins.
    if (!node->is_object()) *node = path.starts_with("precision.") ? dtypes_of(*node, assignment) : Json::object();
  }
  (*node)[path.substr(begin)] = std::move(value);
}

Json resolve_config(const std::string& path, const std::vector<std::string>& assignments) {
  Json document = read_config_file(path);
  for (const auto& assignment : assignments) set_key(document, assignment);
  return validate(config_schema(), document);
}

}  // namespace tesserae::config
