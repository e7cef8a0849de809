#pragma once

#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/os/files.h"
#include "tesserae/train/memory_slot.h"
#include "tesserae/train/snapshot_set.h"
#include "tesserae/train/training_state.h"

namespace tesserae::train {

/// Snapshots of a job's training state in shared memory of its hosts, so that a job which died can go on from the last
/// few steps without reading storage. memory_tier.cpp opens with the protocol.
///
/// Each rank keeps its own part twice (the newest snapshot and the one before) under the names
/// /dev/shm/tesserae-KEY-rank-R-0 and -1; KEY stands for the checkpoint folder. A rank of the next replica holds the
/// same chunks, and is told the random numbers: with replicas, the state of a host that is gone is there twice.
///
/// All ranks have one and call it alike, from the training thread. What it can not do is logged, not thrown: training
/// goes on without it.
class MemoryTier {
 public:
  MemoryTier(TrainingState& state, const os::Path& checkpoints);
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  /// Keeps the values that the state has now. Collective. Returns before they are copied: see wait_copied().
  void save();
  /// Returns when the state's memory may be written again.
  void wait_copied();
  /// Snapshots are of the state's new layout from now on; those of the old one stay until they are replaced.
  void layout_changed();

  /// Fills the state from the newest snapshot that all ranks have, or that the neighbours of those without have, if it
  /// is of step `at_least` or later and of this layout. Collective. Returns its step; nothing: there is no such
  /// snapshot, the state is as it was and all snapshots are gone. If they were of another layout, or of a job of other
  /// size, and later than `at_least`, they are now a checkpoint in the folder (left_snapshots.h).
  std::optional<int64_t> restore(int64_t at_least);

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
  bool agree_on(const std::string& failure, const std::string& consequence);

  TrainingState& state_;
  mesh::Layout layout_;
  os::Path checkpoints_;
  std::string prefix_;    // of the names of all ranks' snapshots
  uint64_t session_ = 0;  // of this job: snapshots of different jobs never mix
  std::vector<MemorySlot> slots_;
  size_t next_ = 0;  // the slot that may be written: not the newest
  bool broken_ = false;
  std::future<void> copying_;
};

}  // namespace tesserae::train
