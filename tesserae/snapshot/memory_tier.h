#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/os/files.h"
#include "tesserae/snapshot/host_copies.h"
#include "tesserae/snapshot/snapshot_buffer.h"
#include "tesserae/snapshot/snapshot_set.h"
#include "tesserae/snapshot/subject.h"

namespace tesserae::snapshot {

/// Snapshots of a job's training state in shared memory of its hosts, so that a job which died can go on from the last
/// few steps without reading storage. memory_tier.cpp opens with the protocol.
///
/// Each rank keeps its own part twice (the newest snapshot and the one before) under the names
/// /dev/shm/tesserae-FOLDER-RUN-rank-R-0 and -1, where FOLDER stands for the checkpoint folder and RUN for its
/// identity: a folder that was removed and made again has another, and what is left of the old one is taken away. A
/// rank of the next replica holds the same chunks, and is told the random numbers: with replicas, the state of a host
/// that is gone is there twice. Where that rank is on the same host, or there is none, another host keeps a copy
/// (host_copies.h), under the same names with -kept behind them.
///
/// All ranks have one and call it alike, from the training thread. What it cannot do is logged, not thrown: training
/// goes on without it.
class MemoryTier {
 public:
  /// `layout`: of the ranks that shard state, as it is now. `identity`: of the folder, the same on all ranks; empty: it
  /// has none. `on_other_hosts`: whether other hosts keep copies.
  MemoryTier(const Subject& subject, const mesh::Layout& layout, const os::Path& checkpoints,
             const std::string& identity = "", bool on_other_hosts = true);
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  /// Keeps the values that the state has now, after `step`, and what is said of it. Collective. Returns before they are
  /// copied: see wait_copied(). Nothing while copies of the snapshot before are still on their way to other hosts.
  /// `last`: the job ends, and keeps them in storage, too; no copies are sent.
  void save(int64_t step, const nlohmann::json& description, bool last = false);
  /// Returns when the state's memory may be written again.
  void wait_copied();
  /// Whether other hosts have all that they are to keep of the newest snapshot. Collective.
  bool is_elsewhere();
  /// Snapshots are of the state's new layout from now on; those of the old one stay until they are replaced.
  void layout_changed(const mesh::Layout& layout);

  /// Of a job that goes on, in a new object, from a later step than that of its newest snapshot: that one is not
  /// written over first. Collective; reads every byte.
  void keep_newest();

  /// What was given to save().
  struct Restored {
    int64_t step = 0;
    nlohmann::json description;
  };
  /// Fills the state from the newest snapshot that all ranks have, or that the neighbours of those without have, if it
  /// is of step `at_least` or later and of this layout. Collective. Nothing: there is no such snapshot, or it does not
  /// fit the model, and the state is as it was. The snapshots stay: whoever does not go on from them takes them away
  /// (remove_all).
  std::optional<Restored> restore(int64_t at_least);
  /// After a restore() that gave nothing: makes a checkpoint in the folder from snapshots of another layout, or of a
  /// job of other size, if they are of a step after `after` (surviving_snapshots.h). Returns of which step; nothing:
  /// there are none. Collective. Throws checkpoint::SaveFailed.
  std::optional<int64_t> save_surviving(int64_t after);

  /// What keeping them has cost this rank.
  struct Figures {
    int64_t copies = 0;
    uint64_t bytes = 0;         ///< of the newest one
    double seconds = 0;         ///< that all copies took, beside forward and backward where the state is on the host
    double waited_seconds = 0;  ///< of these calls, by the training thread
    HostCopies::Figures sent;   ///< to another host
  };
  Figures figures() const;

  /// Takes this rank's snapshots away: the job ended well.
  void remove() noexcept;
  /// Takes everybody's away, also what a larger job left: this one does not continue them.
  void remove_all() noexcept;

 private:
  std::vector<checkpoint::Piece> own_pieces();
  std::vector<checkpoint::Piece> exchange_random();
  HeldByRank held_by_ranks();
  std::optional<std::string> fetch(const SnapshotSet& set, std::string_view own);
  std::string refusal(const MemorySnapshot& snapshot);
  void take_over(const MemorySnapshot& snapshot);
  void choose_keepers();
  bool make_room(const checkpoint::Manifest& manifest, const std::vector<checkpoint::Piece>& pieces);
  void send_copies(std::optional<size_t> slot);
  void go_on_from(int buffer);
  bool agree_on(const std::string& failure, const std::string& consequence);

  const Subject subject_;
  mesh::Layout layout_;
  const os::Path checkpoints_;
  const std::string folder_, prefix_;  // what names of snapshots begin with, of this folder's runs and of this run
  const uint64_t session_;             // of this job: snapshots of different jobs never mix
  std::vector<std::shared_ptr<SnapshotBuffer>> buffers_;
  size_t next_ = 0;  // the buffer that may be written: not the newest
  bool broken_ = false;
  bool refused_ = false;                // what restore() found does not fit
  std::shared_future<double> copying_;  // how many seconds it took
  const bool on_other_hosts_;
  HostCopies copies_;
  Figures figures_;
};

}  // namespace tesserae::snapshot
