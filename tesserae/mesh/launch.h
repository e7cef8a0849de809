#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tesserae::mesh {

/// What the launcher told this process about the job.
struct Launch {
  std::string launcher;  ///< "torchrun", "slurm", "openmpi", "mpich" or "single"
  int rank = 0;          ///< as the launcher numbers processes
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string address = "127.0.0.1";  ///< rendezvous: the store is served by launcher rank 0
  uint16_t port = 0;                  ///< 0: none was given (fine for one process)
  /// The launcher itself already serves a store at that address (torchrun's agent): rank 0 is a client like the others.
  bool store_is_served = false;
};

/// Returns a variable of the environment, or nullptr.
using Lookup = std::function<const char*(const char*)>;

/// Reads the variables of the innermost launcher that started this process: torchrun (RANK), Open MPI
/// (OMPI_COMM_WORLD_RANK), MPICH's Hydra (PMI_RANK, MPI_LOCALRANKID), Slurm (SLURM_PROCID); none of them: one process.
/// mpirun and torchrun start inside Slurm allocations and leave Slurm's variables standing, so Slurm comes last.
///
/// MASTER_ADDR and MASTER_PORT give the rendezvous under every launcher. Without them: under Slurm, the first host of
/// the step and a port derived from the job and step; under MPI on one host, 127.0.0.1 and a port derived from the job.
/// Throws InvalidArgument naming the variables that contradict each other, are missing or are not numbers.
Launch read_launch(const Lookup& lookup);

}  // namespace tesserae::mesh
