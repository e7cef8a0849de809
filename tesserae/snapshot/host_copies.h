#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/world.h"
#include "tesserae/snapshot/snapshot_buffer.h"
#include "tesserae/snapshot/snapshot_set.h"

namespace tesserae::snapshot {

/// Which rank of another host keeps a copy of each rank's snapshots, by rank; -1: none does, because there is no other
/// host, or the neighbour that holds the same chunks is there already (snapshot_set.h). Each host gives its copies to
/// the next one. `layout`: of the ranks that shard state.
std::vector<int> keepers(const mesh::World& world, const mesh::Mesh& mesh, const mesh::Layout& layout);

/// What the name of a copy for a rank of another host ends with, behind that of the rank's own buffer.
inline constexpr const char* kept_suffix = "-kept";

/// Copies of snapshots on another host, where a lost host would take the only ones with it: what this rank sends, and
/// what it keeps for others. host_copies.cpp opens with the protocol. A part of MemoryTier, whose thread rule it has.
class HostCopies {
 public:
  /// `prefix`: of the names of all ranks' snapshots.
  HostCopies(std::shared_ptr<comm::Fabric> job, std::string prefix);

  /// Who keeps whose copies from now on; those of before stay until two newer ones have taken their place. Collective;
  /// end() came before.
  void use(const std::vector<int>& keepers);
  /// Nobody keeps anything any more, and what is kept here is taken away.
  void give_up() noexcept;
  /// Whether any rank of the job keeps something. The same on all ranks.
  bool any() const { return any_; }

  /// Makes room for what this rank keeps of the snapshots in buffer `slot` of the others. `bytes`: how large each
  /// rank's is. Throws IoError: the host has none.
  void prepare(size_t slot, const std::vector<int64_t>& bytes);
  /// Begins to send and receive them, once `own` is `filled`. Returns at once where tensors are on the host.
  void begin(size_t slot, std::shared_ptr<SnapshotBuffer> own, std::shared_future<double> filled);
  /// Returns when every rank has what it keeps. Collective. Throws what Group's verbs throw.
  void end();

  /// Of this rank, up to the last end().
  struct Figures {
    uint64_t bytes = 0;  ///< sent
    double seconds = 0;  ///< that sending and receiving took, beside training
  };
  const Figures& figures() const { return figures_; }

  /// Takes away what this rank keeps.
  void remove() noexcept;

 private:
  using Buffers = std::vector<std::shared_ptr<SnapshotBuffer>>;

  Buffers& buffers_of(int rank);
  void wait();

  const std::shared_ptr<comm::Fabric> job_;
  const std::string prefix_;
  bool any_ = false;
  int keeper_ = -1;         // of this rank
  std::vector<int> wards_;  // for whom this one keeps
  std::map<int, Buffers> kept_;
  int saves_ = 0;                 // since use()
  std::vector<int> members_;      // ranks that send to each other, ...
  comm::Group* group_ = nullptr;  // ... and their group; null: this rank does not
  comm::Ticket sending_;
  std::shared_ptr<Figures> of_this_;  // of what is sent now
  Figures figures_;
};

}  // namespace tesserae::snapshot
