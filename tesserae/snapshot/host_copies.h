#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/world.h"
#include "tesserae/snapshot/snapshot_buffer.h"
#include "tesserae/snapshot/snapshot_set.h"

namespace tesserae::snapshot {

/// What travels of a snapshot at a time: a deadline is one of so many bytes.
inline constexpr int64_t message_bytes = int64_t{64} << 20;

/// Which rank of another host keeps a copy of each rank's snapshots, by rank; -1: none does, because there is no other
/// host, or the neighbour that holds the same chunks is there already (snapshot_set.h). Each host gives its copies to
/// the next one. `layout`: of the ranks that shard state.
std::vector<int> keepers(const mesh::World& world, const mesh::Mesh& mesh, const mesh::Layout& layout);

/// What the name of a copy for a rank of another host ends with, behind that of the rank's own buffer.
inline constexpr std::string_view kept_suffix = "-kept";

/// Copies of snapshots on another host, where a lost host would take the only ones with it: what this rank sends, and
/// what it keeps for others. host_copies.cpp opens with the protocol. A part of MemoryTier, whose thread rule it has;
/// what is not said to be collective is not.
class HostCopies {
 public:
  /// `prefix`: of the names of all ranks' snapshots.
  HostCopies(std::shared_ptr<comm::Fabric> job, std::string prefix);

  /// Who keeps whose copies from now on; those of before stay until two newer ones have taken their place. Collective.
  /// Nothing after give_up().
  void use(const std::vector<int>& keepers);
  /// Nobody keeps anything any more. Called on all ranks.
  void give_up() noexcept;
  /// Whether any rank of the job keeps something. The same on all ranks.
  bool any() const { return any_; }

  /// Whether all ranks have sent and received what was begun last: only then may begin() follow. Collective; waits for
  /// no copy. Throws what Group's verbs throw.
  bool all_are_done();

  /// A snapshot of a rank that is to be sent.
  struct Sent {
    int64_t bytes = 0;  ///< 0: it has none
    size_t slot = 0;    ///< which of its buffers
  };
  /// Makes room for those that this rank keeps. `sent`: by rank. Throws IoError: the host has none.
  void prepare(const std::vector<Sent>& sent);
  /// Begins to send and receive them, once `own` is `filled` (not valid: it is): returns at once where tensors that
  /// travel are on the host, else when it is done.
  void begin(const std::shared_ptr<SnapshotBuffer>& own, std::shared_future<double> filled);
  /// A save has come to its end, also one of which nothing is sent: what nobody needs any more is taken away.
  void tidy();

  /// Of this rank, up to the last all_are_done().
  struct Figures {
    uint64_t bytes = 0;  ///< sent
    double seconds = 0;  ///< that sending and receiving took
  };
  const Figures& figures() const { return figures_; }

  /// Takes away what ranks of this host keep; what is on its way goes nowhere.
  void remove() noexcept;

 private:
  using Buffers = std::vector<std::shared_ptr<SnapshotBuffer>>;
  struct Transfer;

  SnapshotBuffer& kept(int rank, size_t slot);

  const std::shared_ptr<comm::Fabric> job_;
  const std::string prefix_;
  bool any_ = false, given_up_ = false;
  int keeper_ = -1;         // of this rank
  std::vector<int> wards_;  // for whom this one keeps
  std::map<int, Buffers> kept_;
  int saves_ = 0;                       // since use()
  std::vector<int> members_;            // ranks that send to each other, ...
  comm::Group* group_ = nullptr;        // ... and their group; null: this rank does not
  std::shared_ptr<Transfer> transfer_;  // the last one; null: it is accounted for
  comm::Ticket sending_;
  Figures figures_;
};

}  // namespace tesserae::snapshot
