#pragma once

#include "tesserae/launch/launcher.h"
#include "tesserae/os/program.h"

namespace tesserae::bench {

/// Runs this program again as `ranks` local ranks of one thread each, with the same arguments; returns the job's exit
/// status.
inline int start_ranks(int ranks, int argc, char** argv) {
  launch::LocalJob job;
  job.ranks = ranks;
  job.command = {os::program_path()};
  job.command.insert(job.command.end(), argv + 1, argv + argc);
  job.environment = {{"OMP_NUM_THREADS", "1"}};
  return launch::run_local_job(job);
}

}  // namespace tesserae::bench
