#pragma once

#include "tesserae/config/config.h"
#include "tesserae/mesh/world.h"
#include "tesserae/train/job_setup.h"
#include "tesserae/train/resume.h"

namespace tesserae::train {

/// Trains as one rank of the job `world`; every rank calls it with the same arguments: `config` as it was written for
/// the ranks with which the job began (job_size.h), `setup` for those that there are. Rank 0 writes the run folder
/// (config.json, metrics.jsonl, summary.json) and standard output, for as long as somebody reads that: SIGPIPE does not
/// end this process from now on.
///
/// When SIGINT, SIGTERM or SIGUSR1 comes to any rank, or the configured file or command asks for it, all ranks end
/// after the same step and the summary says so. Returns 0 when training is complete; the configuration's
/// preemption.exit_code when it was ended so and its last step is saved; 128 + signal when it was ended and nothing is
/// saved, because the configuration does not ask for checkpoints. Throws CommError when ranks are lost, IoError when
/// the run folder cannot be written, checkpoint::SaveFailed, and what can be wrong with a checkpoint that is resumed.
int train(const config::Config& config, const JobSetup& setup, const mesh::World& world, const Resume& resume = {});

}  // namespace tesserae::train
