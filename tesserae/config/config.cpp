#include "tesserae/config/config.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "tesserae/base/pattern.h"
#include "tesserae/config/config_file.h"

namespace tesserae::config {
namespace {

template <class T>
std::optional<T> optional_value(const Json& value) {
  return value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
}

Config::Run read_run(Json& c, const std::string& name) {
  Json& run = c["run"];
  if (run["folder"].is_null()) run["folder"] = "runs/" + std::filesystem::path(name).stem().string();
  if (run["folder"] == "") throw ConfigError("run.folder", "must not be empty");
  if (run["seed"].is_null()) run["seed"] = c["random_seed"];
  c["random_seed"] = run["seed"];
  return {.folder = run["folder"],
          .weights_folder = optional_value<std::string>(run["weights_folder"]),
          .seed = run["seed"],
          .log_every = run["log_every"],
          .nproc = run["nproc"],
          .device = run["device"],
          .backend = run["backend"],
          .connect_deadline_seconds = run["connect_deadline_seconds"],
          .deadline_seconds = run["deadline_seconds"]};
}

void read_model(Json& c, Config& config) {
  Json& m = c["model"];
  model::GptConfig shape{.dimension = m["dimension"],
                         .layers = m["layers"],
                         .heads = m["heads"],
                         .kv_heads = optional_value<int64_t>(m["kv_heads"]).value_or(0),
                         .feed_forward = optional_value<int64_t>(m["feed_forward"]).value_or(0),
                         .max_sequence = c["data"]["sequence_length"],
                         .window = m["window"],
                         .document_end = m["document_end"].is_null() ? -1 : m["document_end"].get<int64_t>(),
                         .rope_base = m["rope_base"],
                         .norm_epsilon = m["norm_epsilon"],
                         .dropout = m["dropout"],
                         .tied = m["tied"],
                         .experts = m["experts"],
                         .experts_per_token = m["experts_per_token"],
                         .shared_experts = m["shared_experts"],
                         .balance_loss = m["balance_loss"],
                         .z_loss = m["z_loss"],
                         .bias_rate = m["bias_rate"],
                         .capacity_factor = m["capacity_factor"],
                         .seed = c["run"]["seed"]};
  try {
    shape = model::resolved(shape);
  } catch (const InvalidArgument& error) {
    throw ConfigError("model", without_function(error));
  }
  m["kv_heads"] = shape.kv_heads;
  m["feed_forward"] = shape.feed_forward;
  config.model = shape;
  config.vocabulary = optional_value<int64_t>(m["vocabulary"]);
  config.checkpoint_activations = m["checkpoint_activations"];
}

Config::Data read_data(Json& c) {
  Json& d = c["data"];
  const Json paths = d["path"].is_array() ? d["path"] : Json::array({d["path"]});
  if (d["suffixes"].is_null()) {
    d["suffixes"] = Json::array();
    if (d["format"] != "text") d["suffixes"] = {".bin"};
    if (d["format"] == "text" && paths == Json::array({"python:stdlib"})) d["suffixes"] = {".py"};
  }
  const Json weights = d["weights"].is_null() ? Json::array() : d["weights"];
  if (!d["weights"].is_null() && weights.size() != paths.size()) {
    throw ConfigError("data.weights",
                      cat("has ", weights.size(), " entries, but data.path has ", paths.size(), "; give one for each"));
  }
  return {.path = paths.get<std::vector<std::string>>(),
          .weights = weights.get<std::vector<double>>(),
          .format = d["format"],
          .suffixes = d["suffixes"].get<std::vector<std::string>>(),
          .sequence_length = d["sequence_length"],
          .validation_fraction = d["validation_fraction"]};
}

Config::Train read_train(const Json& c) {
  const Json& t = c["train"];
  if (t["eval_every"] > 0 && t["eval_batches"] == 0) {
    throw ConfigError("train.eval_every",
                      cat("is ", t["eval_every"], ", but train.eval_batches is 0: there is nothing to evaluate"));
  }
  if (t["eval_every"] > 0 && c["data"]["validation_fraction"] == 0.0) {
    throw ConfigError("train.eval_every",
                      cat("is ", t["eval_every"], ", but data.validation_fraction is 0: nothing is held out"));
  }
  if (t["sample_tokens"] > 0 && c["data"]["format"] != "text") {
    throw ConfigError("train.sample_tokens",
                      cat("only data of format text can be printed, but data.format is ", c["data"]["format"]));
  }
  return {.steps = t["steps"],
          .batch_per_rank = t["batch_per_rank"],
          .accumulate = t["accumulate"],
          .accumulation = t["accumulation"] == "local" ? shard::Accumulation::local : shard::Accumulation::two_hop,
          .clip_norm = t["clip_norm"],
          .eval_every = t["eval_every"],
          .eval_batches = t["eval_batches"],
          .sample_tokens = t["sample_tokens"],
          .sample_prompt = t["sample_prompt"]};
}

Config::Checkpoint read_checkpoint(const Json& c) {
  const Json& k = c["checkpoint"];
  return {.folder = optional_value<std::string>(k["folder"]),
          .every_steps = k["every_steps"],
          .every_minutes = k["every_minutes"],
          .keep = k["keep"],
          .asynchronous = k["async"],
          .read_back = k["read_back"],
          .deadline_minutes = k["deadline_minutes"],
          .stop_on_error = k["on_error"] == "stop",
          .memory_every_steps = k["memory_every_steps"],
          .memory_on_other_hosts = k["memory_on_other_hosts"]};
}

/// "2GiB", "1.5 GB", "800000000".
int64_t read_bytes(const std::string& key, const std::string& text) {
  static constexpr std::pair<std::string_view, double> units[] = {
      {"", 1},      {"B", 1},        {"KB", 1e3},        {"MB", 1e6},           {"GB", 1e9},
      {"TB", 1e12}, {"KIB", 1024.0}, {"MIB", 1048576.0}, {"GIB", 1073741824.0}, {"TIB", 1099511627776.0}};
  const char* const begin = text.data();
  char* end = nullptr;
  const double number = std::strtod(begin, &end);
  std::string unit;
  for (const char c : std::string_view(end)) {
    if (c != ' ') unit.push_back(static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
  }
  const auto found = std::ranges::find(units, unit, [](const auto& entry) { return entry.first; });
  const double bytes = found == std::end(units) ? 0 : number * found->second;
  if (end == begin || !(bytes >= 1) || bytes > 1e18) {
    throw ConfigError(key, cat("must be a size such as 2GiB, 800MB or a number of bytes, but is \"", text, "\""));
  }
  return static_cast<int64_t>(bytes);
}

Config::Offload read_offload(const Json& c) {
  const Json& o = c["offload"];
  const auto tier = [&o](const char* state) { return offload::tier_from_name(o[state].get<std::string>()); };
  Config::Offload result{
      .tiers = {.parameters = tier("parameters"), .gradients = tier("gradients"), .optimizer = tier("optimizer")},
      .activations = o["activations"],
      .horizon = c["activation_loading_horizon"],
      .smallest = read_size("offload.activation_size", o["activation_size"]),
      .units = optional_value<std::vector<std::string>>(o["activation_units"]),
      .folder = "",
      .memory_limit = std::nullopt};
  if (const Json& limit = c["memory_limit"]; !limit.is_null()) result.memory_limit = read_size("memory_limit", limit);
  const char* const temporary = std::getenv("TMPDIR");
  result.folder = optional_value<std::string>(o["folder"]).value_or(temporary != nullptr ? temporary : "/var/tmp");
  if (!result.tiers.uses(offload::Tier::disk)) return result;
  if (c["hybrid_shard_degree"].is_string()) {
    throw ConfigError("hybrid_shard_degree", "\"auto\" does not know what state on a disk costs: give a degree");
  }
  if (c["checkpoint"]["memory_every_steps"] > 0) {
    throw ConfigError("checkpoint.memory_every_steps",
                      "keeps the whole state in memory, which the section offload puts on a disk: take 0");
  }
  return result;
}

Config::BadSteps read_bad_steps(const Json& c, const Config::Checkpoint& checkpoint) {
  const Json& b = c["bad_steps"];
  using Policy = Config::BadSteps::Policy;
  const std::string name = b["policy"];
  const Policy policy = name == "stop" ? Policy::stop : name == "rollback" ? Policy::rollback : Policy::skip;
  if (policy == Policy::rollback && !checkpoint.enabled()) {
    throw ConfigError("bad_steps.policy",
                      "is \"rollback\", but nothing says when to keep a state to go back to: give "
                      "checkpoint.memory_every_steps or another key of that section");
  }
  return {.policy = policy, .limit = b["limit"], .loss_spike = optional_value<double>(b["loss_spike"])};
}

Config::Recovery read_recovery(const Json& c) {
  const Json& r = c["recovery"];
  if (!r["shared"].is_null() && r["min_ranks"] == 0) {
    throw ConfigError("recovery.shared",
                      "is for jobs that may have fewer ranks after the loss of a host: give recovery.min_ranks, too");
  }
  return {.replacements = r["replacements"],
          .max_restarts = r["max_restarts"],
          .min_ranks = r["min_ranks"],
          .shared = optional_value<std::string>(r["shared"]).value_or(""),
          .check_replicas_every_steps = r["check_replicas_every_steps"]};
}

Config::Optimizer read_optimizer(const Json& c) {
  const Json& o = c["optimizer"];
  return {.name = o["name"],
          .lr = o["lr"],
          .beta1 = o["betas"][0],
          .beta2 = o["betas"][1],
          .epsilon = o["epsilon"],
          .weight_decay = o["weight_decay"],
          .momentum = o["momentum"],
          .schedule = o["schedule"],
          .warmup_steps = o["warmup_steps"],
          .min_lr_ratio = o["min_lr_ratio"]};
}

mesh::Degrees degrees_of(const Json& d) {
  return {.parameters = d["parameters"], .gradients = d["gradients"], .optimizer = d["optimizer"]};
}

Config::Sharding read_sharding(const Json& c) {
  const Json& s = c["sharding"];
  const bool automatic = c["hybrid_shard_degree"].is_string();
  Config::Sharding sharding{
      .hybrid_shard_degree = automatic ? 0 : c["hybrid_shard_degree"].get<int>(),
      .automatic = automatic,
      .degrees = std::nullopt,
      .strategy = s["strategy"].is_null() ? "" : s["strategy"].get<std::string>(),
      .free_after_forward = optional_value<bool>(s["free_after_forward"]),
      .free_after_backward = optional_value<bool>(s["free_after_backward"]),
      .limit_all_gathers = s["limit_all_gathers"],
      .limit_reductions = s["limit_reductions"],
      .parameter_wire = comm::wire_of(c["wire"]["parameters"]),
      .gradient_wire = comm::wire_of(c["wire"]["gradients"]),
      .tensor_parallel_degree = c["tensor_parallel_degree"],
      .context_parallel_degree = c["context_parallel_degree"],
      .expert_parallel_degree = c["expert_parallel_degree"],
      .context_parallel_method = context::method_from_name(c["context_parallel_method"].get<std::string>()),
      .sequence_parallel = s["sequence_parallel"],
      .warn_of_pool_misses = c["fsdp_cache_flush_warnings"]};
  const int degree = sharding.hybrid_shard_degree;
  const std::string& name = sharding.strategy;
  const bool takes_degree = mesh::takes_degree(name);
  check_one_dial(c);
  if (automatic && !name.empty()) {
    throw ConfigError("sharding.strategy", cat(name, " contradicts hybrid_shard_degree = \"auto\": give one of them"));
  }
  if (!c["degrees"].is_null()) {
    if (!name.empty())
      throw ConfigError("degrees", cat("contradicts sharding.strategy = ", name, ": give one of them"));
    sharding.degrees = degrees_of(c["degrees"]);
  } else if (takes_degree && degree == 0) {
    throw ConfigError("hybrid_shard_degree",
                      cat("must be given with sharding.strategy = ", name, ": it is its degree"));
  } else if (!name.empty() && !takes_degree && degree != 0) {
    throw ConfigError("sharding.strategy",
                      cat(name, " contradicts hybrid_shard_degree = ", degree, ": give one of them"));
  }
  return sharding;
}

/// What cannot be with experts, or without.
void check_experts(const Config& config) {
  const int degree = config.sharding.expert_parallel_degree;
  const int64_t experts = config.model.experts;
  if (experts == 0 && degree > 1) {
    throw ConfigError("expert_parallel_degree",
                      cat("is ", degree, ", but the model has no experts: set model.experts"));
  }
  if (experts > 0 && config.model.capacity_factor > 0 && config.sharding.context_parallel_degree > 1) {
    throw ConfigError("model.capacity_factor",
                      "drops the last tokens of a batch, whose order context ranks do not keep: "
                      "take 0, or context_parallel_degree 1");
  }
}

c10::ScalarType dtype(const Json& name) {
  return name == "bf16" ? c10::ScalarType::BFloat16 : name == "fp16" ? c10::ScalarType::Half : c10::ScalarType::Float;
}

void read_precision(Json& c, Config& config) {
  Json& p = c["precision"];
  if (p.is_string()) {
    config.precision = p;
    return;
  }
  if (p["reduce"].is_null()) p["reduce"] = p["parameters"];
  config.precision = "custom";
  config.custom_precision = {
      .parameters = dtype(p["parameters"]), .reduce = dtype(p["reduce"]), .masters = dtype(p["masters"])};
}

}  // namespace

void check_one_dial(const Json& c) {
  const Json& degree = c["hybrid_shard_degree"];
  if (!c["degrees"].is_null() && degree != 0) {
    throw ConfigError("degrees", cat("contradicts hybrid_shard_degree = ", degree, ": give one of them"));
  }
  const Json& schedule = c["dial"]["schedule"];
  if (degree.is_string() && !schedule.empty()) {
    throw ConfigError("dial.schedule", "contradicts hybrid_shard_degree = \"auto\": give one of them");
  }
  for (size_t i = 0; i < schedule.size(); ++i) {
    const std::string key = cat("dial.schedule[", i, "]");
    if (schedule[i]["hybrid_shard_degree"].is_null() == schedule[i]["degrees"].is_null()) {
      throw ConfigError(key, "must have either hybrid_shard_degree or degrees");
    }
    if (i > 0 && schedule[i]["step"] <= schedule[i - 1]["step"]) {
      throw ConfigError(key + ".step", cat("must be more than that of the entry before, ", schedule[i - 1]["step"],
                                           ", but is ", schedule[i]["step"]));
    }
  }
}

Config::Preemption read_preemption(const Json& c) {
  const Json& p = c["preemption"];
  const int code = p["exit_code"];
  if (code >= 1 && code <= 3) {
    throw ConfigError("preemption.exit_code",
                      cat("is ", code, ", which says that a run failed: take 0, or 4 to 255, for example 75"));
  }
  return {.file = optional_value<std::string>(p["file"]).value_or(""),
          .command = optional_value<std::string>(p["command"]).value_or(""),
          .every_seconds = p["every_seconds"],
          .exit_code = code};
}

int64_t read_size(const std::string& key, const Json& value) {
  return value.is_string() ? read_bytes(key, value) : value.get<int64_t>();
}

bool Config::Offload::leaves(const std::string& unit) const {
  return !units || std::ranges::any_of(*units, [&](const std::string& pattern) { return matches(pattern, unit); });
}

Config make_config(const Json& resolved, const std::string& name) {
  Config config;
  config.resolved = resolved;
  Json& c = config.resolved;
  config.run = read_run(c, name);
  read_model(c, config);
  config.data = read_data(c);
  config.train = read_train(c);
  config.checkpoint = read_checkpoint(c);
  config.bad_steps = read_bad_steps(c, config.checkpoint);
  config.recovery = read_recovery(c);
  config.preemption = read_preemption(c);
  config.monitor = {.enabled = optional_value<bool>(c["monitor"]["enabled"]),
                    .every_seconds = c["monitor"]["every_seconds"],
                    .port = optional_value<int>(c["monitor"]["port"]),
                    .host = c["monitor"]["host"],
                    .allow_control = c["monitor"]["allow_control"]};
  config.offload = read_offload(c);
  config.optimizer = read_optimizer(c);
  config.sharding = read_sharding(c);
  check_experts(config);
  config.dial_headroom = c["dial"]["headroom"];
  config.planned_steps = c["dial"]["planned_steps"];
  read_precision(c, config);
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& assignments) {
  return make_config(resolve_config(path, assignments), path);
}

std::vector<std::pair<int64_t, mesh::Degrees>> dial_schedule(const Json& c, int ranks) {
  std::vector<std::pair<int64_t, mesh::Degrees>> changes;
  for (const Json& entry : c["dial"]["schedule"]) {
    const char* key = entry["degrees"].is_null() ? "hybrid_shard_degree" : "degrees";
    try {
      changes.emplace_back(entry["step"],
                           entry["degrees"].is_null()
                               ? mesh::from_hybrid_shard_degree(entry["hybrid_shard_degree"], ranks).degrees
                               : mesh::Layout(ranks, degrees_of(entry["degrees"])).degrees());
    } catch (const InvalidArgument& error) {
      throw ConfigError(cat("dial.schedule[", changes.size(), "].", key), without_function(error));
    }
  }
  return changes;
}

mesh::Strategy strategy_of(const Config& config, int ranks) {
  const Config::Sharding& s = config.sharding;
  mesh::Strategy strategy;
  try {
    strategy =
        mesh::resolve({.name = s.strategy, .hybrid_shard_degree = s.hybrid_shard_degree, .degrees = s.degrees}, ranks);
  } catch (const InvalidArgument& error) {
    throw ConfigError(s.degrees                   ? "degrees"
                      : s.hybrid_shard_degree > 0 ? "hybrid_shard_degree"
                                                  : "sharding.strategy",
                      without_function(error));
  }
  if (s.free_after_forward) strategy.free_after_forward = *s.free_after_forward;
  if (s.free_after_backward) strategy.free_after_backward = *s.free_after_backward;
  return strategy;
}

shard::Precision precision_of(const Config& config, bool has_bf16) {
  if (config.precision == "custom") return config.custom_precision;
  if (config.precision == "fp16") return shard::Precision::fp16();
  if (config.precision == "bf16" || (config.precision == "auto" && has_bf16)) return shard::Precision::bf16();
  return shard::Precision::fp32();
}

}  // namespace tesserae::config
