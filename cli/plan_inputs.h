#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tesserae/cost/workload.h"
#include "tesserae/plan/plan.h"

// What `tesserae plan` is given: the command line, and the files that it names.
namespace tesserae::cli {

struct PlanArguments {
  std::string model_file, script, traced;
  std::vector<std::string> units;  // of the script: classes of modules
  std::string dtype, reduce, optimizer = "adamw", accumulation = "two_hop";
  double parameters = 0;
  model::GptConfig shape{.vocabulary = 128000, .dimension = 0, .layers = 0, .heads = 0, .tied = false};
  plan::Training training{.run = {.micro_batch = 0, .context = 0, .expert = 0}};
  plan::Cluster cluster{.devices = 0, .per_host = 0};
  std::string machine = "h100";
  double memory = 0, inside_gbps = 0, between_gbps = 0, tflops = 0;  // above 0: instead of the machine's
  bool keep_activations = false, keep_gathered = false, tied = false, no_sequence_parallel = false;
  bool json = false, all = false;
  size_t top = 20;
};

/// Python has told the user why.
struct Refused {};

/// A data sheet, or a file that `tesserae probe` wrote, with what the command line changes. Throws ConfigError.
cost::Machine machine_of(const PlanArguments& arguments);

/// By its shape, from a file, traced or being traced. Sets arguments.dtype where that is not given. Throws ConfigError,
/// InvalidArgument and Refused.
std::unique_ptr<cost::Workload> workload_of(PlanArguments& arguments);

}  // namespace tesserae::cli
