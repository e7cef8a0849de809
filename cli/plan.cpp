#include "tesserae/plan/plan.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/config.h"
#include "tesserae/config/config_file.h"
#include "tesserae/config/json.h"
#include "tesserae/plan/table.h"

namespace tesserae::cli {
namespace {

struct PlanArguments {
  std::string model_file, dtype = "bf16", reduce, optimizer = "adamw", accumulation = "two_hop";
  double parameters = 0;
  model::GptConfig shape{.vocabulary = 128000, .dimension = 0, .layers = 0, .heads = 0, .tied = false};
  plan::Training training{.run = {.micro_batch = 0, .context = 0}};
  plan::Cluster cluster{.devices = 0, .per_host = 0};
  std::string machine = "h100";
  double memory = 0, inside_gbps = 0, between_gbps = 0, tflops = 0;  // above 0: instead of the machine's
  bool keep_activations = false, keep_gathered = false, tied = false, no_sequence_parallel = false;
  bool json = false, all = false;
  size_t top = 20;
};

int bytes_of(const std::string& dtype) {
  return dtype == "fp32" ? 4 : 2;
}

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

/// 80e9 as 80000000000, which is what CLI11 takes as a size; anything else stays.
std::string written_out(std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  char digits[64];
  std::snprintf(digits, sizeof digits, "%.0f", value);
  if (*end == '\0' && value > 0 && value < 1e18) text = digits;
  return {};
}

bool is_hugging_face(const nlohmann::json& document) {
  return document.contains("model_type") || document.contains("hidden_size");
}

/// Throws ConfigError for a config.json of Hugging Face's whose model has another shape than ours.
void check_shape(const std::string& path, const nlohmann::json& document) {
  const auto refuse = [&](const auto&... what) { throw config::ConfigError("", cat(path, ": ", what...)); };
  for (const char* experts : {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}) {
    const nlohmann::json count = document.value(experts, nlohmann::json());
    if (count.is_null() || count == 0 || count == 1) continue;
    refuse(experts, " = ", count.dump(),
           ": mixtures of experts have other formulas than the dense models of this plan");
  }
  const nlohmann::json type = document.value("model_type", nlohmann::json());
  if (type != "llama" && type != "mistral") {
    refuse("model_type", type.is_null() ? " is missing" : cat(" = ", type.dump()),
           "; the formulas are those of llama and mistral (SwiGLU, no biases). For a model of about that size give "
           "--parameters, --layers and --dimension");
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
    return {.vocabulary = document.at("vocab_size"),
            .dimension = document.at("hidden_size"),
            .layers = document.at("num_hidden_layers"),
            .heads = heads,
            .kv_heads = kv_heads.is_null() ? heads : kv_heads.get<int64_t>(),
            .feed_forward = document.at("intermediate_size"),
            .tied = document.value("tie_word_embeddings", false)};
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

int run_plan(PlanArguments& arguments) {
  plan::Training& training = arguments.training;
  training.dtype = arguments.dtype;
  training.run.compute_bytes = bytes_of(arguments.dtype);
  training.reduce_bytes = bytes_of(arguments.reduce.empty() ? arguments.dtype : arguments.reduce);
  training.run.recompute = !arguments.keep_activations;
  training.run.sequence_parallel = !arguments.no_sequence_parallel;
  training.state_bytes = training.master_bytes * (arguments.optimizer == "adamw" ? 2
                                                  : arguments.optimizer == "sgd" ? 1
                                                                                 : 0);
  training.two_hop = arguments.accumulation == "two_hop";
  training.free_after_forward = !arguments.keep_gathered;
  plan::Cluster& cluster = arguments.cluster;
  arguments.shape.tied = arguments.tied;
  try {
    cluster.machine = machine_of(arguments);
    if (cluster.per_host == 0) cluster.per_host = cluster.machine.per_host;
    if (cluster.devices == 0) cluster.devices = cluster.per_host;
    const model::GptConfig shape = model_of(arguments);
    const std::vector<plan::Entry> entries = plan::make_plan(shape, training, cluster);
    const size_t count = arguments.all ? entries.size() : arguments.top;
    if (arguments.json) {
      std::printf("%s\n", plan::as_json(shape, training, cluster, entries, count).dump(2).c_str());
    } else {
      std::printf("%s", plan::as_text(shape, training, cluster, entries, count).c_str());
    }
    return entries.front().fits ? 0 : exit_failure;
  } catch (const config::ConfigError&) {
    throw;
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("", config::without_function(error));
  }
}

void add_model_options(CLI::App& verb, PlanArguments& arguments) {
  verb.add_option("--model", arguments.model_file,
                  "A configuration of ours, or a config.json of Hugging Face's (llama, mistral)")
      ->check(CLI::ExistingFile)
      ->group("Model");
  verb.add_option("--parameters", arguments.parameters,
                  "About so many parameters (500e9): the feed-forward layer fills up")
      ->group("Model");
  verb.add_option("--layers", arguments.shape.layers, "Blocks of the transformer")->group("Model");
  verb.add_option("--dimension", arguments.shape.dimension, "Features of a token")->group("Model");
  verb.add_option("--heads", arguments.shape.heads, "Heads of attention; by default one for 128 features")
      ->group("Model");
  verb.add_option("--kv-heads", arguments.shape.kv_heads, "Heads of keys and values; by default as many")
      ->group("Model");
  verb.add_option("--vocabulary", arguments.shape.vocabulary, "Tokens that there are")
      ->capture_default_str()
      ->group("Model");
  verb.add_flag("--tied", arguments.tied, "Embedding and head are one matrix")->group("Model");
}

void add_step_options(CLI::App& verb, PlanArguments& arguments) {
  plan::Training& training = arguments.training;
  verb.add_option("--batch", training.batch, "Sequences of a step, over all devices")
      ->capture_default_str()
      ->group("Step");
  verb.add_option("--sequence", training.run.sequence, "Tokens of a sequence")->capture_default_str()->group("Step");
  verb.add_option("--context", training.run.context,
                  "Context-parallel degree: ranks that share out each sequence; by default every degree")
      ->group("Step");
  verb.add_option("--micro-batch", training.run.micro_batch,
                  "Sequences that a rank computes at once; by default what is fastest and fits, of each layout")
      ->group("Step");
  const auto dtypes = CLI::IsMember({"fp32", "bf16", "fp16"});
  verb.add_option("--dtype", arguments.dtype, "Of parameters and activations; masters are fp32")
      ->check(dtypes)
      ->capture_default_str()
      ->group("Step");
  verb.add_option("--reduce", arguments.reduce, "Of gradients that are summed; by default that of parameters")
      ->check(dtypes)
      ->group("Step");
  verb.add_option("--optimizer", arguments.optimizer, "What it keeps: two states of a parameter, one, none")
      ->check(CLI::IsMember({"adamw", "sgd", "sgd-without-momentum"}))
      ->capture_default_str()
      ->group("Step");
  verb.add_option("--accumulation", arguments.accumulation, "Where gradients of micro-batches add up")
      ->check(CLI::IsMember({"two_hop", "local"}))
      ->capture_default_str()
      ->group("Step");
  verb.add_flag("--keep-activations", arguments.keep_activations, "Blocks keep them instead of running forward again")
      ->group("Step");
  verb.add_flag("--keep-gathered", arguments.keep_gathered, "Gathered parameters stay from forward to backward")
      ->group("Step");
  verb.add_flag("--no-sequence-parallel", arguments.no_sequence_parallel,
                "Activations between the split layers are whole on every rank")
      ->group("Step");
}

void add_cluster_options(CLI::App& verb, PlanArguments& arguments) {
  plan::Cluster& cluster = arguments.cluster;
  verb.add_option("--machine", arguments.machine,
                  cat("A data sheet (", cost::sheet_names(), ") or what `tesserae probe` wrote"))
      ->capture_default_str()
      ->group("Cluster");
  verb.add_option("--devices", cluster.devices, "In the whole job; by default one host full")
      ->check(CLI::PositiveNumber)
      ->group("Cluster");
  verb.add_option("--per-host", cluster.per_host, "Of them, on one host; by default as the machine has")
      ->check(CLI::PositiveNumber)
      ->group("Cluster");
  verb.add_option(
          "--memory", arguments.memory,
          "Of a device (measured without one: of a host), by default the machine's: 80GB (10^9 bytes each), 80e9")
      ->transform(CLI::AsSizeValue(true))
      ->transform(CLI::Validator(written_out, ""))  // the last one is applied first
      ->group("Cluster");
  verb.add_option("--headroom", cluster.headroom, "Share of the memory that must stay free")
      ->capture_default_str()
      ->group("Cluster");
  verb.add_option("--inside-gbps", arguments.inside_gbps,
                  "Instead of the machine's: gigabits a second that a rank sends to its host's others")
      ->check(CLI::PositiveNumber)
      ->group("Cluster");
  verb.add_option("--between-gbps", arguments.between_gbps, "The same to other hosts, while all ranks send")
      ->check(CLI::PositiveNumber)
      ->group("Cluster");
  verb.add_option("--tflops", arguments.tflops,
                  "Instead of the machine's: 10^12 operations a second that products reach on a rank")
      ->check(CLI::PositiveNumber)
      ->group("Cluster");
}

}  // namespace

void add_plan(CLI::App& program, int& status) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* verb = program.add_subcommand("plan", "Compute memory and traffic of every layout of a model on a cluster");
  add_model_options(*verb, *arguments);
  add_step_options(*verb, *arguments);
  add_cluster_options(*verb, *arguments);
  verb->add_option("--top", arguments->top, "How many layouts are printed")->capture_default_str();
  verb->add_flag("--all", arguments->all, "All of them");
  verb->add_flag("--json", arguments->json, "In bytes and seconds, hop by hop");
  verb->footer(
      "T tensor-parallel ranks x N data-parallel ranks; P, G, O of the N hold parameters, gradients and optimizer "
      "state\n"
      "between them. Nothing is measured here: docs/plan.md has the formulas, which take what data sheets say or\n"
      "`tesserae probe` has measured. Those that fit come first, by estimated time.\n"
      "Exit status 1: no layout fits.");
  verb->callback([arguments, &status] { status = run_plan(*arguments); });
}

}  // namespace tesserae::cli
