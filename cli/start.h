#pragma once

#include <string>
#include <vector>

#include "tesserae/launch/launcher.h"
#include "tesserae/mesh/world.h"

namespace tesserae::cli {

/// What this process is to the job: one of its ranks, or what starts the ranks of this host.
struct Start {
  bool is_rank = true;   ///< this process is one: train
  bool alone = false;    ///< the job's only rank, which nobody started: is_rank may be taken back to launch it
  int ranks = 1;         ///< of the job
  launch::LocalJob job;  ///< if not: ranks and hosts of what it starts; the command is the caller's
  std::string by;        ///< the launcher or platform that says so, as mesh/ names it; "single": none
  mesh::World world = mesh::World::single_host(0, 1);  ///< of a rank
};

/// A process that a launcher started is a rank, and so is a single one. Ranks are started by
///  - a process that nobody started, with --nproc (`nproc`; 0: not given), else `otherwise` ranks;
///  - that of a host in a job of SageMaker or Kubernetes (mesh/host_job.h): --nproc, else as many as the platform says,
///    else one for each accelerator, else `otherwise`;
///  - that of a host in Slurm or under mpirun, where it is the only one there, with --nproc.
/// Throws config::ConfigError where --nproc contradicts the launcher, InvalidArgument for what variables contradict.
Start find_start(int nproc, int otherwise, const mesh::Lookup& environment);

/// The ranks of such a job run this program's `command`, as copies of this process where that is possible.
void run_in_ranks(launch::LocalJob& job, std::vector<std::string> command);

}  // namespace tesserae::cli
