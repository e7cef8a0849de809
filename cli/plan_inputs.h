#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/cost/workload.h"
#include "tesserae/plan/plan.h"

// What `tesserae plan` is given: the command line, and the files that it names.
namespace tesserae::cli {

struct PlanArguments {
  std::function<bool(const char* option)> given;  // on the command line
  std::string model_file, script, traced;
  std::vector<std::string> units;  // of the script: classes of modules
  std::string dtype, reduce, optimizer = "adamw", accumulation = "two_hop";
  double parameters = 0;
  model::GptConfig shape{.vocabulary = 128000, .dimension = 0, .layers = 0, .heads = 0, .tied = false};
  plan::Training training{.run = {.micro_batch = 0, .context = 0, .expert = 0}};
  plan::Cluster cluster{.devices = 0, .per_host = 0};
  std::string machine = "h100";
  std::optional<double> memory, inside_gbps, between_gbps, tflops;  // instead of the machine's
  // Of a configuration of ours: a step has so many sequences of each so many devices. 0: training.batch.
  int64_t batch_of_ranks = 0, ranks_of_batch = 1;
  bool keep_activations = false, keep_gathered = false, tied = false, no_sequence_parallel = false;
  bool json = false, all = false;
  size_t top = 20;
};

/// Python has told the user why.
struct Refused {};

/// A data sheet, or a file that `tesserae probe` wrote, with what the command line changes. Throws ConfigError.
cost::Machine machine_of(const PlanArguments& arguments);

/// By its shape, from a file, traced or being traced. Sets arguments.dtype where that is not given, and of what else is
/// not given that which a configuration of ours says of a step. Throws ConfigError, also for options that would change
/// nothing, InvalidArgument and Refused.
std::unique_ptr<cost::Workload> workload_of(PlanArguments& arguments);

}  // namespace tesserae::cli
