#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/config/config.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/data/loader.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/mesh/world.h"

namespace tesserae::train {

/// What a configuration comes to on this machine for a number of ranks, known before any of them trains.
struct JobSetup {
  mesh::Mesh mesh{1};              ///< of the ranks of the job
  c10::Device device = c10::kCPU;  ///< of this rank
  mesh::Strategy strategy;
  offload::Tiers tiers;  ///< where the state lies at first
  std::string choice;    ///< with hybrid_shard_degree "auto": why these degrees; empty while they are not chosen yet
  shard::Precision precision;
  model::GptConfig model;  ///< with the vocabulary
  int64_t parameters = 0;
  std::vector<data::Source> sources;  ///< one, unless they are mixed
  int64_t training_samples = 0;
  int64_t validation_samples = 0;  ///< held out
  int64_t tokens_per_step = 0;     ///< of all ranks
};

/// Throws config::ConfigError for what cannot be trained: a degree that does not fit the ranks, data that are missing,
/// empty or shorter than one sequence, a vocabulary that is too small for the data, a backend that is not for the
/// device. `device`: this rank's (choose_device).
JobSetup set_up_job(const config::Config& config, int ranks, c10::Device device);

/// How the engine shards: what of its options the configuration and the setup say.
shard::Options options_of(const config::Config& config, const JobSetup& setup);

/// How a rank runs the model, as cost/ counts it.
cost::Execution execution_of(const config::Config& config, const JobSetup& setup);

/// Which activations leave, as cost/ counts it.
cost::Leaving leaving_of(const config::Config& config);

/// The data of one job rank of the setup.
data::Loader make_loader(const config::Config& config, const JobSetup& setup, int rank);

/// What the configuration calls a dtype: "fp32", "bf16", "fp16".
std::string dtype_name(c10::ScalarType dtype);

/// Two lines for people: the model on its ranks, the data in their batches.
std::string describe(const JobSetup& setup, const config::Config& config);

}  // namespace tesserae::train
