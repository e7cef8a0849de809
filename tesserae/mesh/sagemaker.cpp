#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/mesh/host_job.h"
#include "tesserae/mesh/variables.h"

namespace tesserae::mesh {
namespace {

using Json = nlohmann::json;

constexpr uint16_t toolkit_port = 7777;

std::vector<std::string> names_from(const Json& json, const std::string& variable, const std::string& text) {
  std::vector<std::string> names;
  for (const Json& name : json) {
    if (!json.is_array() || !name.is_string() || name.get<std::string>().empty()) {
      names.clear();
      break;
    }
    names.push_back(name);
  }
  if (names.empty())
    fail_launch(cat(variable, "=", text, R"( is not a JSON list of names, such as ["algo-1","algo-2"])"));
  std::vector<std::string> sorted = names;
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice != sorted.end()) fail_launch(cat(variable, "=", text, " names ", *twice, " twice"));
  return names;
}

Json resource_config(const Variables& variables) {
  if (!variables.has("SM_RESOURCE_CONFIG")) return Json::object();
  const std::string text = variables.text("SM_RESOURCE_CONFIG");
  Json config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) fail_launch(cat("SM_RESOURCE_CONFIG=", text, " is not a JSON object"));
  return config;
}

std::string current_host(const Variables& variables, const Json& config, const std::vector<std::string>& names) {
  if (variables.has("SM_CURRENT_HOST")) return variables.text("SM_CURRENT_HOST");
  if (const auto found = config.find("current_host"); found != config.end() && found->is_string()) return *found;
  if (names.size() == 1) return names[0];
  fail_launch(cat("SageMaker's job has ", names.size(), " hosts, but SM_CURRENT_HOST is not set: which one is this?"));
}

void check_one_group(const Json& config) {
  const auto groups = config.find("instance_groups");
  if (groups == config.end() || !groups->is_array() || groups->size() < 2) return;
  fail_launch(cat("SM_RESOURCE_CONFIG names ", groups->size(),
                  " instance groups, and nobody says how many ranks their hosts have: use one group, or start the "
                  "ranks by torchrun"));
}

}  // namespace

std::optional<HostJob> read_sagemaker(const Lookup& lookup) {
  const Variables variables(lookup);
  const Json config = resource_config(variables);
  const std::string listed = variables.text("SM_HOSTS");
  std::vector<std::string> names;
  if (!listed.empty()) {
    names = names_from(Json::parse(listed, nullptr, /*allow_exceptions=*/false), "SM_HOSTS", listed);
  } else if (config.contains("hosts")) {
    names = names_from(config["hosts"], "hosts of SM_RESOURCE_CONFIG", config["hosts"].dump());
  } else {
    return std::nullopt;
  }
  check_one_group(config);
  const std::string here = current_host(variables, config, names);
  const auto found = std::ranges::find(names, here);
  if (found == names.end()) fail_launch(cat("SM_CURRENT_HOST=", here, " is none of the hosts ", Json(names).dump()));
  HostJob job{.platform = "sagemaker",
              .hosts = static_cast<int>(names.size()),
              .host = static_cast<int>(found - names.begin()),
              .address = names[0],
              .port = toolkit_port};
  if (variables.has("SM_NUM_GPUS")) job.ranks = variables.number("SM_NUM_GPUS", job.platform);
  if (job.ranks < 0) fail_launch(cat("SM_NUM_GPUS=", job.ranks, " is negative"));
  for (const char* name : {"SM_MASTER_ADDR", "MASTER_ADDR"}) {
    if (variables.has(name)) job.address = variables.text(name);
  }
  for (const char* name : {"SM_MASTER_PORT", "MASTER_PORT"}) {
    if (variables.has(name)) job.port = variables.port(name);
  }
  return job;
}

}  // namespace tesserae::mesh
