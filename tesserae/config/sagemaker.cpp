#include "tesserae/config/sagemaker.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include "tesserae/base/nearest.h"
#include "tesserae/config/config_file.h"
#include "tesserae/config/init_config.h"
#include "tesserae/config/keys.h"
#include "tesserae/config/schema.h"
#include "tesserae/config/validate.h"
#include "tesserae/mesh/host_job.h"
#include "tesserae/os/files.h"

namespace tesserae::config {
namespace {

constexpr const char* parameters_variable = "SM_HP_MP_PARAMETERS";
constexpr const char* parameters_name = "mp_parameters";

std::string value_of(const mesh::Lookup& environment, const std::string& name) {
  const char* value = environment(name.c_str());
  return value == nullptr ? std::string() : std::string(value);
}

std::string base_folder(const mesh::Lookup& environment) {
  const std::string named = value_of(environment, "SAGEMAKER_BASE_DIR");
  return named.empty() ? "/opt/ml" : named;
}

std::string channel_variable(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return "SM_CHANNEL_" + name;
}

Json parse_object(const std::string& variable, const std::string& text) {
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  // What is encoded twice comes from an SDK that had encoded it already.
  if (value.is_string()) value = Json::parse(value.get<std::string>(), nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) throw ConfigError("", cat(variable, " is not a JSON object but ", text.substr(0, 60)));
  return value;
}

/// SageMaker's own file has each value as text: JSON, or text as it is.
Json hyperparameters_of(const Json& file) {
  Json found = Json::object();
  for (const auto& [name, value] : file.items()) {
    Json parsed =
        value.is_string() ? Json::parse(value.get<std::string>(), nullptr, /*allow_exceptions=*/false) : value;
    found[name] = parsed.is_discarded() ? value : std::move(parsed);
  }
  return found;
}

/// The variables that the toolkit would have made of what is mounted.
std::map<std::string, std::string> mounted_variables(const std::string& base) {
  const std::string input = base + "/input";
  std::map<std::string, std::string> found;
  found["SM_RESOURCE_CONFIG"] = read_config_file(input + "/config/resourceconfig.json").dump();
  found["SM_MODEL_DIR"] = base + "/model";
  found["SM_OUTPUT_DATA_DIR"] = base + "/output/data";
  if (os::files().exists(input + "/config/hyperparameters.json")) {
    found["SM_HPS"] = hyperparameters_of(read_config_file(input + "/config/hyperparameters.json")).dump();
  }
  Json channels = Json::array();
  if (os::files().exists(input + "/data")) {
    for (const std::string& name : os::files().list(input + "/data")) {
      if (os::files().status(input + "/data/" + name).kind != os::FileKind::directory) continue;
      found[channel_variable(name)] = input + "/data/" + name;
      channels.push_back(name);
    }
  }
  found["SM_CHANNELS"] = channels.dump();
  return found;
}

bool is_sagemaker(const mesh::Lookup& environment) {
  return !value_of(environment, "SM_HOSTS").empty() || !value_of(environment, "SM_RESOURCE_CONFIG").empty();
}

/// Without those that are SageMaker's own, and without the modelparallel parameters.
Json hyperparameters(const mesh::Lookup& environment) {
  const std::string text = value_of(environment, "SM_HPS");
  if (text.empty()) return Json::object();
  const Json all = parse_object("SM_HPS", text);
  Json own = Json::object();
  for (const auto& [name, value] : all.items()) {
    if (name.starts_with("sagemaker_") || name == "_tuning_objective_metric" || name == parameters_name) continue;
    own[name] = value;
  }
  return own;
}

std::optional<Json> raw_parameters(const mesh::Lookup& environment) {
  if (const std::string text = value_of(environment, parameters_variable); !text.empty()) {
    return parse_object(parameters_variable, text);
  }
  const std::string all = value_of(environment, "SM_HPS");
  if (all.empty()) return std::nullopt;
  const Json parsed = parse_object("SM_HPS", all);
  if (!parsed.contains(parameters_name)) return std::nullopt;
  const Json& found = parsed[parameters_name];
  return parse_object("mp_parameters of SM_HPS", found.is_string() ? found.get<std::string>() : found.dump());
}

void set_hyperparameters(Json& document, const mesh::Lookup& environment) {
  if (const auto parameters = sagemaker_parameters(environment)) {
    for (const auto& [name, value] : parameters->items()) document[name] = value;
  }
  const Json given = hyperparameters(environment);
  for (const auto& [name, value] : given.items()) {
    const auto is_it = [&name = name](const Key& key) { return key.path == name; };
    if (std::ranges::none_of(config_keys(), is_it)) {
      std::vector<std::string> known;
      for (const Key& key : config_keys()) known.push_back(key.path);
      throw ConfigError(name, cat("is a hyperparameter of this job (SM_HPS) and no key of the configuration; did you "
                                  "mean ",
                                  nearest(name, known), "?"));
    }
    set_key(document, cat(name, "=", value.dump()));
  }
}

bool lacks(const Json& document, const char* section, const char* key) {
  return !document.contains(section) || !document[section].is_object() || !document[section].contains(key) ||
         document[section][key].is_null();
}

void set_folders(Json& document, const std::string& name, const mesh::Lookup& environment) {
  const auto set = [&](const char* section, const char* key, const std::string& value) {
    if (lacks(document, section, key)) set_key(document, cat(section, ".", key, "=", Json(value).dump()));
  };
  if (const std::string out = value_of(environment, "SM_OUTPUT_DATA_DIR"); !out.empty()) {
    set("run", "folder", out + "/" + std::filesystem::path(name).stem().string());
  }
  if (const std::string model = value_of(environment, "SM_MODEL_DIR"); !model.empty()) {
    set("run", "weights_folder", model);
  }
  const auto job = mesh::read_sagemaker(environment);
  const std::string checkpoints = base_folder(environment) + "/checkpoints";
  if (job->hosts == 1) {
    set("checkpoint", "folder", checkpoints);
  } else if (document.contains("checkpoint") && lacks(document, "checkpoint", "folder")) {
    throw ConfigError(
        "checkpoint.folder",
        cat("is not given, and this job has ", job->hosts, " hosts, each with a ", checkpoints,
            " of its own: name a folder that all see, such as channel:NAME/checkpoints of a file system"));
  }
}

std::string in_channel(const std::string& key, const std::string& path, const mesh::Lookup& environment) {
  constexpr std::string_view prefix = "channel:";
  if (!path.starts_with(prefix)) return path;
  const size_t slash = path.find('/');
  const std::string name = path.substr(prefix.size(), slash == std::string::npos ? slash : slash - prefix.size());
  const std::string folder = value_of(environment, channel_variable(name));
  if (folder.empty()) {
    const std::string channels = value_of(environment, "SM_CHANNELS");
    throw ConfigError(key, cat("is ", path, ", but ", channel_variable(name), " is not set: ",
                               !is_sagemaker(environment) ? "this is no training job of SageMaker"
                               : channels.empty()         ? "the job has no such channel"
                                                          : "the job's channels are " + channels));
  }
  return folder + (slash == std::string::npos ? "" : path.substr(slash));
}

void resolve_channels(Json& document, const mesh::Lookup& environment) {
  const auto resolve = [&](const std::string& key, Json& value) {
    if (value.is_string()) value = in_channel(key, value.get<std::string>(), environment);
  };
  using Place = std::pair<const char*, const char*>;
  for (const auto& [section, key] : std::initializer_list<Place>{{"data", "path"},
                                                                 {"run", "folder"},
                                                                 {"run", "weights_folder"},
                                                                 {"checkpoint", "folder"},
                                                                 {"offload", "folder"}}) {
    if (lacks(document, section, key)) continue;
    Json& value = document[section][key];
    const std::string path = cat(section, ".", key);
    resolve(path, value);
    if (!value.is_array()) continue;
    for (size_t i = 0; i < value.size(); ++i) resolve(cat(path, "[", i, "]"), value[i]);
  }
}

}  // namespace

mesh::Lookup sagemaker_environment() {
  return sagemaker_environment([](const char* name) -> const char* { return std::getenv(name); });
}

mesh::Lookup sagemaker_environment(const mesh::Lookup& environment) {
  const std::string base = base_folder(environment);
  if (is_sagemaker(environment) || !os::files().exists(base + "/input/config/resourceconfig.json")) return environment;
  const auto mounted = std::make_shared<const std::map<std::string, std::string>>(mounted_variables(base));
  return [environment, mounted](const char* name) {
    const char* const value = environment(name);
    if (value != nullptr && *value != '\0') return value;
    const auto found = mounted->find(name);
    return found == mounted->end() ? nullptr : found->second.c_str();
  };
}

Config load_train_config(const std::string& path, const std::vector<std::string>& assignments,
                         const mesh::Lookup& environment) {
  Json document = read_config_file(path);
  const bool in_job = is_sagemaker(environment);
  if (in_job) set_hyperparameters(document, environment);
  for (const std::string& assignment : assignments) set_key(document, assignment);
  if (in_job) set_folders(document, path, environment);
  resolve_channels(document, environment);
  return make_config(validate(config_schema(), document), path);
}

std::optional<Json> sagemaker_parameters(const mesh::Lookup& environment) {
  std::optional<Json> parameters = raw_parameters(environment);
  if (!parameters) return std::nullopt;
  try {
    validate_init_config(*parameters);
  } catch (const ConfigError& error) {
    throw ConfigError("", cat(without_function(error), " (in ", parameters_variable,
                              ", the modelparallel parameters of the job's estimator; they are those of SMP v2)"));
  }
  return parameters;
}

}  // namespace tesserae::config
