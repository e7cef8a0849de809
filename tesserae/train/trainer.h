#pragma once

#include "tesserae/mesh/world.h"
#include "tesserae/train/config.h"
#include "tesserae/train/plan.h"

namespace tesserae::train {

/// Trains as one rank of the job `world`; every rank calls it with the same configuration. Rank 0 writes the run folder
/// (config.json, metrics.jsonl, summary.json) and standard output.
///
/// Returns 0, or 128 + signal when SIGINT or SIGTERM came to any rank: all ranks then end after the same step, and the
/// summary says so. Throws CommError when ranks are lost, IoError when the run folder can not be written.
int train(const Config& config, const Plan& plan, const mesh::World& world);

}  // namespace tesserae::train
