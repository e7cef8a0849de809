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
#include "tesserae/train/job_setup.h"

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
  if (arguments.memory) machine.memory = *arguments.memory;
  if (arguments.inside_gbps) {
    machine.links.inside = *arguments.inside_gbps * 1e9 / 8;
    machine.gather = machine.reduce = machine.all_reduce = {};
  }
  if (arguments.between_gbps) {
    machine.links.between = *arguments.between_gbps * 1e9 / 8;
    machine.knows_network = true;
  }
  if (arguments.tflops) {
    cost::Machine::Compute compute = machine.of(arguments.dtype);
    compute.products = compute.attention = cost::Curve(*arguments.tflops * 1e12);
    machine.compute[arguments.dtype] = compute;
  }
  if (arguments.inside_gbps || arguments.between_gbps || arguments.tflops) machine.name += " as changed here";
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
  for (const char* biases : {"attention_bias", "mlp_bias"}) {
    if (document.value(biases, nlohmann::json()) == true) refuse(biases, " is true; the formulas have no biases");
  }
  for (const char* size :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}) {
    const nlohmann::json& given = document.at(size);
    if (!given.is_number_integer() || given.get<int64_t>() < 1) refuse(size, " = ", given.dump(), " is no size");
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

/// `--dtype` stands for all of the section `precision`, as its text form does.
void take_precision(const config::Config& config, PlanArguments& arguments) {
  if (arguments.given("--dtype")) return;
  const shard::Precision precision = config::precision_of(config, /*has_bf16=*/true);
  const auto bytes = [](c10::ScalarType dtype) { return static_cast<int>(c10::elementSize(dtype)); };
  const c10::ScalarType computed = precision.parameters.value_or(at::kFloat);
  arguments.dtype = train::dtype_name(computed);
  if (!arguments.given("--reduce")) arguments.reduce = train::dtype_name(precision.reduce.value_or(computed));
  arguments.training.master_bytes = bytes(precision.masters.value_or(at::kFloat));
}

/// The step of a job with this configuration, but for what the command line says of it.
void take_step(const config::Config& config, PlanArguments& arguments) {
  const auto take = [&](const char* option, auto& value, const auto& of_file) {
    if (!arguments.given(option)) value = of_file;
  };
  take_precision(config, arguments);
  plan::Training& training = arguments.training;
  take("--sequence", training.run.sequence, config.data.sequence_length);
  take("--micro-batch", training.run.micro_batch, config.train.batch_per_rank);
  take("--batch", arguments.batch_of_ranks, config.train.batch_per_rank * config.train.accumulate);
  // Ranks that split layers or sequences train on the same ones.
  const config::Config::Sharding& sharding = config.sharding;
  arguments.ranks_of_batch = int64_t{sharding.tensor_parallel_degree} * sharding.context_parallel_degree;
  const bool momentum = config.optimizer.momentum > 0;
  take("--optimizer", arguments.optimizer,
       config.optimizer.name == "sgd" && !momentum ? "sgd-without-momentum" : config.optimizer.name);
  take("--accumulation", arguments.accumulation,
       config.train.accumulation == shard::Accumulation::two_hop ? "two_hop" : "local");
  take("--keep-activations", arguments.keep_activations, !config.checkpoint_activations);
  take("--keep-gathered", arguments.keep_gathered, !sharding.free_after_forward.value_or(true));
  take("--no-sequence-parallel", arguments.no_sequence_parallel, !sharding.sequence_parallel);
  training.gathers_at_once = sharding.limit_all_gathers;
  training.reductions_at_once = sharding.limit_reductions;
}

/// A configuration of ours, or the config.json that Hugging Face keeps beside weights.
model::GptConfig read_model(PlanArguments& arguments) {
  const std::string& path = arguments.model_file;
  const nlohmann::json document = nlohmann::json::parse(config::read_config_file(path).dump());
  if (is_hugging_face(document)) return read_hugging_face(path, document);
  const config::Config config = config::load_config(path);
  if (!config.vocabulary && !arguments.given("--vocabulary")) {
    throw config::ConfigError("model.vocabulary",
                              "is that of the data, which are not looked at here; give a number, or --vocabulary");
  }
  take_step(config, arguments);
  model::GptConfig shape = config.model;
  shape.vocabulary = config.vocabulary.value_or(arguments.shape.vocabulary);
  return shape;
}

model::GptConfig model_of(PlanArguments& arguments) {
  if (!arguments.model_file.empty()) {
    model::GptConfig shape = read_model(arguments);
    if (arguments.given("--vocabulary")) shape.vocabulary = arguments.shape.vocabulary;
    return shape;
  }
  if (arguments.parameters == 0 || arguments.shape.layers == 0 || arguments.shape.dimension == 0) {
    throw config::ConfigError("", "give --model FILE, or --parameters with --layers and --dimension");
  }
  return plan::model_of(arguments.parameters, arguments.shape);
}

/// Throws ConfigError for an option that says something of another kind of model than the one that is there.
void refuse_what_changes_nothing(const PlanArguments& arguments) {
  const bool traced = !arguments.script.empty() || !arguments.traced.empty();
  if (!traced && arguments.model_file.empty()) return;
  std::vector<const char*> others = {"--parameters", "--layers", "--dimension", "--heads", "--kv-heads", "--tied"};
  if (traced) others.insert(others.end(), {"--model", "--vocabulary", "--sequence", "--no-sequence-parallel"});
  for (const char* option : others) {
    if (!arguments.given(option)) continue;
    throw config::ConfigError(
        "", cat(option, " changes nothing of ", traced ? "a traced model" : "the model of a file", ": leave it out"));
  }
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
  refuse_what_changes_nothing(arguments);
  if (arguments.script.empty() && arguments.traced.empty()) {
    const model::GptConfig model = model_of(arguments);
    if (arguments.dtype.empty()) arguments.dtype = "bf16";
    return std::make_unique<cost::Transformer>(model);
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
