#include "tesserae/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/numbers.h"
#include "cli/plan_inputs.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/config.h"
#include "tesserae/config/json.h"
#include "tesserae/plan/table.h"

namespace tesserae::cli {
namespace {

int bytes_of(const std::string& dtype) {
  return dtype == "fp32" ? 4 : 2;
}

/// 80e9 and 1.5TB as 80000000000 and 1500000000000, which is what CLI11 takes as a size; what configurations have no
/// word for either is left to it, and of anything else, what is no size at all is refused.
std::string written_out(std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && (!std::isfinite(value) || value <= 0)) {
    return cat("must be a positive number, but is ", text);
  }
  for (const char* const rest : {"", "B"}) {  // also 1.5T
    try {
      text = std::to_string(config::read_size("--memory", cat(text, rest)));
      return {};
    } catch (const config::ConfigError&) {
    }
  }
  return {};
}

int plan_of(PlanArguments& arguments) {
  arguments.shape.tied = arguments.tied;
  const std::unique_ptr<cost::Workload> workload = workload_of(arguments);
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
  cluster.machine = machine_of(arguments);
  if (cluster.per_host == 0) cluster.per_host = cluster.machine.per_host;
  if (cluster.devices == 0) cluster.devices = cluster.per_host;
  if (arguments.batch_of_ranks > 0) {
    training.batch = arguments.batch_of_ranks * std::max<int64_t>(1, cluster.devices / arguments.ranks_of_batch);
  }
  const std::vector<plan::Entry> entries = plan::make_plan(*workload, training, cluster);
  const size_t count = arguments.all ? entries.size() : arguments.top;
  if (arguments.json) {
    std::printf("%s\n", plan::as_json(*workload, training, cluster, entries, count).dump(2).c_str());
  } else {
    std::printf("%s", plan::as_text(*workload, training, cluster, entries, count).c_str());
  }
  return entries.front().fits ? 0 : exit_failure;
}

int run_plan(PlanArguments& arguments) {
  try {
    return plan_of(arguments);
  } catch (const Refused&) {
    return exit_configuration;
  } catch (const config::ConfigError&) {
    throw;
  } catch (const InvalidArgument& error) {
    throw config::ConfigError("", config::without_function(error));
  }
}

void add_model_options(CLI::App& verb, PlanArguments& arguments) {
  verb.add_option("--model", arguments.model_file,
                  "A configuration of ours, which also says what a step is where no option does, or a config.json of "
                  "Hugging Face's (llama, mistral, mixtral)")
      ->check(CLI::ExistingFile)
      ->group("Model");
  CLI::Option* script =
      verb.add_option("--script", arguments.script,
                      "A Python file with model_fn() and batch (and loss(output)), which is traced; rows of that batch "
                      "are then what --batch and --micro-batch count")
          ->check(CLI::ExistingFile)
          ->group("Model");
  verb.add_option("--units", arguments.units,
                  "Of the script's model: classes of modules that are sharded as units; by default what lies in "
                  "ModuleLists")
      ->needs(script)
      ->group("Model");
  verb.add_option("--traced", arguments.traced, "What was traced before (tsm.plan(...).facts), a file or -")
      ->excludes(script)
      ->group("Model");
  verb.add_option("--parameters", arguments.parameters,
                  "About so many parameters (500e9): the feed-forward layer fills up")
      ->check(positive())
      ->group("Model");
  verb.add_option("--layers", arguments.shape.layers, "Blocks of the transformer")->group("Model");
  verb.add_option("--dimension", arguments.shape.dimension, "Features of a token")->group("Model");
  verb.add_option("--heads", arguments.shape.heads, "Heads of attention; by default one for 128 features")
      ->group("Model");
  verb.add_option("--kv-heads", arguments.shape.kv_heads, "Heads of keys and values; by default as many")
      ->group("Model");
  verb.add_option("--vocabulary", arguments.shape.vocabulary, "Tokens that there are; of --model, instead of its own")
      ->capture_default_str()
      ->group("Model");
  verb.add_flag("--tied", arguments.tied, "Embedding and head are one matrix")->group("Model");
}

void add_step_options(CLI::App& verb, PlanArguments& arguments) {
  plan::Training& training = arguments.training;
  verb.add_option("--batch", training.batch, "Sequences of a step (rows, of a script), over all devices")
      ->capture_default_str()
      ->group("Step");
  verb.add_option("--sequence", training.run.sequence, "Tokens of a sequence")->capture_default_str()->group("Step");
  verb.add_option("--context", training.run.context,
                  "Context-parallel degree: ranks that share out each sequence; by default every degree")
      ->group("Step");
  verb.add_option("--expert", training.run.expert,
                  "Expert-parallel degree: ranks that share out the experts of a layer; by default every degree")
      ->group("Step");
  verb.add_option("--micro-batch", training.run.micro_batch,
                  "Sequences that a rank computes at once; 0, the default: what is fastest and fits, of each layout")
      ->group("Step");
  const auto dtypes = CLI::IsMember({"fp32", "bf16", "fp16"});
  verb.add_option("--dtype", arguments.dtype, "Of parameters and activations, by default bf16; masters are fp32")
      ->check(dtypes)
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
      ->check(positive())
      ->group("Cluster");
  verb.add_option("--per-host", cluster.per_host, "Of them, on one host; by default as the machine has")
      ->check(positive())
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
      ->check(positive())
      ->group("Cluster");
  verb.add_option("--between-gbps", arguments.between_gbps, "The same to other hosts, while all ranks send")
      ->check(positive())
      ->group("Cluster");
  verb.add_option("--tflops", arguments.tflops,
                  "Instead of the machine's: 10^12 operations a second that products reach on a rank")
      ->check(positive())
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
  arguments->given = [verb](const char* option) { return verb->count(option) > 0; };
  verb->footer(
      "T tensor-parallel ranks x N data-parallel ranks; P, G, O of the N hold parameters, gradients and optimizer "
      "state\n"
      "between them. Nothing is measured here: docs/plan.md has the formulas, which take what data sheets say or\n"
      "`tesserae probe` has measured. Those that fit come first, by estimated time.\n"
      "Exit status 1: no layout fits.");
  verb->callback([arguments, &status] { status = run_plan(*arguments); });
}

}  // namespace tesserae::cli
