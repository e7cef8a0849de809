#pragma once

#include <cstdint>
#include <string>

#include "tesserae/mesh/strategy.h"
#include "tesserae/mesh/world.h"
#include "tesserae/train/config.h"

namespace tesserae::train {

/// What a configuration comes to for a number of ranks, known before any of them starts.
struct Plan {
  int ranks = 1;
  mesh::Strategy strategy;
  int64_t vocabulary = 0;
  int64_t training_tokens = 0;    ///< in the data, held-out part excluded
  int64_t validation_tokens = 0;  ///< held out
};

/// Throws ConfigError for what can not be trained: a degree that does not fit the ranks, data that are missing, empty
/// or shorter than one sequence, a vocabulary that is too small for the data, a device that is not there.
Plan plan_job(const Config& config, int ranks);

/// The plan in a few lines for people.
std::string describe(const Plan& plan, const Config& config);

/// Trains as one rank of the job `world`; every rank calls it with the same configuration. Rank 0 writes the run folder
/// (config.json, metrics.jsonl, summary.json) and standard output.
///
/// Returns 0, or 128 + signal when SIGINT or SIGTERM came to any rank: all ranks then end after the same step, and the
/// summary says so. Throws ConfigError before anything else happens, CommError when ranks are lost.
int train(const Config& config, const mesh::World& world);

}  // namespace tesserae::train
