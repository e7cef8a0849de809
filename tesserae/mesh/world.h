#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

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
};

/// The ranks of a job, ordered by host whatever the launcher did. Immutable; 8 bytes per rank of the job.
///
/// World orders ranks by host (hosts in order of their lowest launcher rank), within a host by launcher rank. All other
/// code means this order when it says rank.
class World {
 public:
  /// Reads torchrun's, Slurm's, Open MPI's or MPICH's variables, in this order of preference; none of them: one process.
  /// `lookup` returns a variable or nullptr (std::getenv by default). Until the hosts are known by exchange
  /// (`with_hosts`), ranks are taken to be placed on hosts in blocks of local_size.
  /// Throws InvalidArgument naming the variables that contradict each other, are missing or are no numbers.
  static World from_environment();
  static World from_environment(const std::function<const char*(const char*)>& lookup);

  /// `size` ranks on one host, this process being `rank`.
  static World single_host(int rank, int size);

  /// The same job, now that the host of each launcher rank is known: `host_of[launcher rank]`, any distinct labels.
  World with_hosts(const std::vector<std::string>& host_of) const;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(launcher_rank_.size()); }
  int hosts() const { return hosts_; }
  int host(int rank) const { return host_[rank]; }
  int launcher_rank(int rank) const { return launcher_rank_[rank]; }
  /// The ranks on the host of `rank`, ascending (they are consecutive).
  std::vector<int> host_ranks(int rank) const;
  const Launch& launch() const { return launch_; }

 private:
  World() = default;

  Launch launch_;
  int rank_ = 0;
  int hosts_ = 1;
  std::vector<int32_t> host_;           // by rank
  std::vector<int32_t> launcher_rank_;  // by rank
};

}  // namespace tesserae::mesh
