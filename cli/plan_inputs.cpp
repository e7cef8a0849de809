#include "cli/plan_inputs.h"

#include <filesystem>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/python.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/config.h"
#include "tesserae/config/config_file.h"
#include "tesserae/config/json.h"
#include "tesserae/cost/traced.h"

namespace tesserae::cli {
namespace {

/// A data sheet, or a file that `tesserae probe` wrote.
cost::Machine read_machine(const std::string& name) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(name, failed)) {
    try {
      return cost::data_sheet(name);
    } catch (const InvalidArgument& error) {
      throw config::ConfigError("", cat("--machine: ", config::without_function(error), ", and no such file"));
    }
  }
  const nlohmann::json document = nlohmann::json::parse(config::read_config_file(name).dump());
  try {
    return cost::machine_from(document);
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("", cat(name, ": ", config::without_function(error)));
  }
}

}  // namespace

cost::Machine machine_of(const PlanArguments& arguments) {
  cost::Machine machine = read_machine(arguments.machine);
  if (arguments.memory > 0) machine.memory = arguments.memory;
  if (arguments.inside_gbps > 0) {
    machine.links.inside = arguments.inside_gbps * 1e9 / 8;
    machine.gather = machine.reduce = machine.all_reduce = {};
  }
  if (arguments.between_gbps > 0) {
    machine.links.between = arguments.between_gbps * 1e9 / 8;
    machine.knows_network = true;
  }
  if (arguments.tflops > 0) {
    cost::Machine::Compute compute = machine.of(arguments.dtype);
    compute.products = compute.attention = cost::Curve(arguments.tflops * 1e12);
    machine.compute[arguments.dtype] = compute;
  }
  if (arguments.inside_gbps > 0 || arguments.between_gbps > 0 || arguments.tflops > 0)
    machine.name += " as changed here";
  return machine;
}

namespace {

bool is_hugging_face(const nlohmann::json& document) {
  return document.contains("model_type") || document.contains("hidden_size");
}

/// Throws ConfigError for a config.json of Hugging Face's whose model has another shape than ours.
void check_shape(const std::string& path, const nlohmann::json& document) {
  const auto refuse = [&](const auto&... what) { throw config::ConfigError("", cat(path, ": ", what...)); };
  const nlohmann::json type = document.value("model_type", nlohmann::json());
  for (const char* experts : {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}) {
    const nlohmann::json count = document.value(experts, nlohmann::json());
    if (type == "mixtral" || count.is_null() || count == 0 || count == 1) continue;
    refuse(experts, " = ", count.dump(), " with model_type ", type.dump(),
           ": of the mixtures of experts mixtral alone has the shape of the formulas");
  }
  if (type != "llama" && type != "mistral" && type != "mixtral") {
    refuse("model_type", type.is_null() ? " is missing" : cat(" = ", type.dump()),
           "; the formulas are those of llama, mistral and mixtral (SwiGLU, no biases). For a model of about that size "
           "give --parameters, --layers and --dimension");
  }
  const int64_t dimension = document.at("hidden_size"), heads = document.at("num_attention_heads");
  const nlohmann::json head = document.value("head_dim", nlohmann::json());
  if (!head.is_null() && head.get<int64_t>() * heads != dimension) {
    refuse("head_dim = ", head.dump(), " is not hidden_size / num_attention_heads = ", dimension, " / ", heads,
           "; the formulas have no other size of a head");
  }
}

model::GptConfig read_hugging_face(const std::string& path, const nlohmann::json& document) {
  try {
    check_shape(path, document);
    const int64_t heads = document.at("num_attention_heads");
    const nlohmann::json kv_heads = document.value("num_key_value_heads", nlohmann::json());
    const bool mixture = document.at("model_type") == "mixtral";
    return {.vocabulary = document.at("vocab_size"),
            .dimension = document.at("hidden_size"),
            .layers = document.at("num_hidden_layers"),
            .heads = heads,
            .kv_heads = kv_heads.is_null() ? heads : kv_heads.get<int64_t>(),
            .feed_forward = document.at("intermediate_size"),
            .tied = document.value("tie_word_embeddings", false),
            .experts = mixture ? document.at("num_local_experts").get<int64_t>() : 0,
            .experts_per_token = mixture ? document.at("num_experts_per_tok").get<int64_t>() : 2};
  } catch (const nlohmann::json::exception& error) {
    throw config::ConfigError("", cat(path, ": ", error.what()));
  }
}

/// A configuration of ours, or the config.json that Hugging Face keeps beside weights.
model::GptConfig read_model(const std::string& path) {
  const nlohmann::json document = nlohmann::json::parse(config::read_config_file(path).dump());
  if (is_hugging_face(document)) return read_hugging_face(path, document);
  const config::Config config = config::load_config(path);
  if (!config.vocabulary) {
    throw config::ConfigError("model.vocabulary", "is that of the data, which are not looked at here; give a number");
  }
  model::GptConfig shape = config.model;
  shape.vocabulary = *config.vocabulary;
  return shape;
}

model::GptConfig model_of(const PlanArguments& arguments) {
  if (!arguments.model_file.empty()) return read_model(arguments.model_file);
  if (arguments.parameters == 0 || arguments.shape.layers == 0 || arguments.shape.dimension == 0) {
    throw config::ConfigError("", "give --model FILE, or --parameters with --layers and --dimension");
  }
  return plan::model_of(arguments.parameters, arguments.shape);
}

/// What `python -m tesserae.planning` says of the script.
std::string trace_script(const PlanArguments& arguments) {
  std::vector<std::string> words = {arguments.script, "--dtype", arguments.dtype.empty() ? "bf16" : arguments.dtype};
  for (const std::string& unit : arguments.units) words.insert(words.end(), {"--units", unit});
  const Answer answer = ask_python("plan --script", "tesserae.planning", words);
  if (answer.status == exit_configuration) throw Refused();  // it has said why
  if (answer.status != 0) throw InvalidArgument("plan --script", cat(arguments.script, " could not be traced"));
  return answer.output;
}

cost::Traced read_traced(const PlanArguments& arguments) {
  if (!arguments.script.empty()) return cost::Traced(nlohmann::json::parse(trace_script(arguments)));
  if (arguments.traced != "-") {
    return cost::Traced(nlohmann::json::parse(config::read_config_file(arguments.traced).dump()));
  }
  const std::string text(std::istreambuf_iterator<char>(std::cin), {});
  const nlohmann::json document = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) throw config::ConfigError("", "--traced -: standard input is no JSON");
  return cost::Traced(document);
}

}  // namespace

std::unique_ptr<cost::Workload> workload_of(PlanArguments& arguments) {
  if (arguments.script.empty() && arguments.traced.empty()) {
    if (arguments.dtype.empty()) arguments.dtype = "bf16";
    return std::make_unique<cost::Transformer>(model_of(arguments));
  }
  auto traced = std::make_unique<cost::Traced>(read_traced(arguments));
  if (arguments.dtype.empty()) arguments.dtype = traced->dtype();
  if (arguments.dtype != traced->dtype()) {
    throw config::ConfigError(
        "", cat("--dtype ", arguments.dtype, ": the model was traced in ", traced->dtype(), "; trace it again"));
  }
  return traced;
}

}  // namespace tesserae::cli
