#include "tesserae/config/init_config.h"

#include "tesserae/config/config.h"
#include "tesserae/config/keys.h"
#include "tesserae/config/schema.h"
#include "tesserae/config/validate.h"

namespace tesserae::config {
namespace {

bool is_taken(const std::string& path) {
  const size_t dot = path.find('.');
  const Json& properties = init_config_schema()["properties"];
  if (dot == std::string::npos) return properties.contains(path);
  const std::string section = path.substr(0, dot);
  return properties.contains(section) && properties[section]["properties"].contains(path.substr(dot + 1));
}

Json part_of(const Json& schema, std::initializer_list<const char*> names) {
  Json part = schema;
  part.erase("required");
  part["properties"] = Json::object();
  for (const char* name : names) part["properties"][name] = schema["properties"][name];
  return part;
}

// A key that the command line knows was not misspelt: it stands in the wrong kind of configuration.
void check_belongs(const Json& document, const Json& wanted, const std::string& prefix) {
  if (!document.is_object()) return;
  for (const auto& [name, value] : document.items()) {
    if (wanted.contains(name)) {
      if (wanted[name].contains("properties")) check_belongs(value, wanted[name]["properties"], name + ".");
      continue;
    }
    for (const Key& key : config_keys()) {
      const bool is_meant = key.path == prefix + name || key.path.ends_with("." + name);
      if (!is_meant || is_taken(key.path)) continue;
      throw ConfigError(prefix + name, cat("is read by `tesserae train` only (as ", key.path,
                                           "): a script says that itself, and tsm.init does not take it"));
    }
  }
}

}  // namespace

const Json& init_config_schema() {
  static const Json schema = [] {
    Json part =
        part_of(config_schema(),
                {"hybrid_shard_degree", "sm_activation_offloading", "activation_loading_horizon",
                 "fsdp_cache_flush_warnings", "allow_empty_shards", "tensor_parallel_degree", "context_parallel_degree",
                 "expert_parallel_degree", "random_seed", "context_parallel_method", "degrees", "$comment", "run",
                 "wire", "offload", "memory_limit", "dial", "preemption", "monitor"});
    part["title"] = "Configuration of tsm.init";
    part["properties"]["run"] =
        part_of(config_schema()["properties"]["run"], {"folder", "connect_deadline_seconds", "deadline_seconds"});
    part["properties"]["offload"] =
        part_of(config_schema()["properties"]["offload"], {"optimizer", "folder", "activation_size"});
    // Where the rest lies a script says by itself, with FSDP's own arguments.
    part["properties"]["offload"]["properties"]["optimizer"] = {
        {"description",
         "State of torch's optimizers whose parameters are on the host: where those are, or on a disk while no step "
         "works on it (docs/offload.md)."},
        {"enum", {"device", "disk"}},
        {"default", "device"}};
    // Of a script's own layers; those of `tesserae train` always multiply so.
    part["properties"]["cpu_bf16_products"] = {
        {"description",
         "How linear layers multiply bf16 and fp16 on an x86 CPU without AVX-512: as torch does, or fp32 "
         "copies block by block, rounded once."},
        {"enum", {"torch", "fp32"}},
        {"default", "torch"}};
    return part;
  }();
  return schema;
}

Json validate_init_config(const Json& document) {
  check_belongs(document, init_config_schema()["properties"], "");
  Json resolved = validate(init_config_schema(), document);
  check_one_dial(resolved);
  read_preemption(resolved);
  Json& size = resolved["offload"]["activation_size"];
  size = read_size("offload.activation_size", size);
  Json& limit = resolved["memory_limit"];
  if (!limit.is_null()) limit = read_size("memory_limit", limit);
  return resolved;
}

}  // namespace tesserae::config
