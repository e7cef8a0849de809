#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/mesh/launch.h"

namespace tesserae::mesh {

/// The ranks of a job, ordered by host whatever the launcher did. Immutable. Takes 4 bytes for each host, and 4 for
/// each rank where the launcher's order is another.
///
/// World orders ranks by host (hosts in order of their lowest launcher rank), within a host by launcher rank. All other
/// code means this order when it says rank.
class World {
 public:
  /// The job that the launcher describes in the environment (launch.h says how it is read; `lookup` returns a variable
  /// or nullptr, std::getenv by default). Until the hosts are known by exchange (`with_hosts`), ranks are taken to be
  /// placed on hosts in blocks of local_size. Throws InvalidArgument naming the variables that contradict each other,
  /// are missing or are not numbers.
  static World from_environment();
  static World from_environment(const Lookup& lookup);

  /// `size` ranks on one host, this process being `rank`.
  static World single_host(int rank, int size);

  /// `size` ranks that met without a launcher of ours, on hosts yet unknown; `served`: their store does not end with
  /// rank 0.
  static World joined(int rank, int size, bool served);

  /// The same job, now that the host of each launcher rank is known: `host_of[launcher rank]`, any distinct labels.
  /// Throws InvalidArgument unless there is one label for each rank.
  World with_hosts(const std::vector<std::string>& host_of) const;

  int rank() const { return rank_; }                                  ///< this process, in [0, size())
  int size() const { return launch_.size; }                           ///< how many ranks the job has
  int hosts() const { return static_cast<int>(first_rank_.size()); }  ///< how many there are
  int host(int rank) const;                                           ///< the host of `rank`, in [0, hosts())
  /// What the launcher numbered `rank` as.
  int launcher_rank(int rank) const {
    return launcher_rank_.empty() ? rank : launcher_rank_[static_cast<size_t>(rank)];
  }
  /// The ranks on the host of `rank`, ascending (they are consecutive).
  std::vector<int> host_ranks(int rank) const;
  const Launch& launch() const { return launch_; }  ///< what the launcher said of this process

 private:
  World() = default;

  Launch launch_;
  int rank_ = 0;
  std::vector<int32_t> first_rank_;     // by host, ascending: ranks of a host are consecutive
  std::vector<int32_t> launcher_rank_;  // by rank; empty where it is the rank
};

/// The world of some ranks of a job, in ascending order, its own among them: `members[i]` is rank i there, on the same
/// host as in the job. Throws InvalidArgument for members that are not so.
World world_of(const World& job, const std::vector<int>& members);

}  // namespace tesserae::mesh
