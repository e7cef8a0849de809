#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

class Snapshot;

struct SaverOptions {
  os::Path folder;
  int keep = 0;                                                   ///< how many checkpoints stay; 0: all
  bool asynchronous = false;                                      ///< save() returns at once and a thread writes
  bool read_back = false;                                         ///< each rank reads what it wrote: SaveJob
  std::chrono::milliseconds deadline = std::chrono::minutes(30);  ///< until it is committed
  int64_t block_bytes = 1 << 20;                                  ///< for checksums: docs/format.md
};

/// A step could not be saved, on whatever rank it failed; thrown on all ranks with the cause. Older checkpoints are as
/// they were, and training may go on.
class SaveFailed : public IoError {
 public:
  SaveFailed(int64_t step, const std::string& cause, bool taken = false);
  int64_t step;
  bool taken;  ///< the folder is another job's by now (FolderTaken): no later save succeeds
};

/// Saves the training state of a job, step by step, to one folder. All ranks have one and call it alike, from the
/// training thread; "collective" below means on the control lane (Fabric::everyone).
///
///   saver.save(state);          // at a step's edge
///   forward, backward;          // beside the copying
///   saver.wait_copied();        // before the optimizer changes what is being copied
///   optimizer.step();
///   if (sum over ranks of saver.failed()) saver.finish();   // where the ranks agree on things anyway; throws
///   ...
///   saver.finish();             // at the end
///
/// The thread that writes uses no collective: ranks meet in the folder (writer.cpp) and, for the outcome, in finish().
class Saver {
 public:
  /// Collective: the ranks agree on a name for this job's saves.
  Saver(std::shared_ptr<comm::Fabric> fabric, SaverOptions options);
  /// Stops what is being written, without committing it, and logs a failure that nobody has seen. Not collective. A
  /// storage that hangs is waited for 30 s (or the deadline, if that is shorter): then the thread that writes is left
  /// behind with what it writes.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Saves the values that the pieces have now. Collective: finishes the last save first. Synchronous: returns when the
  /// checkpoint is committed. Asynchronous: returns when what forward changes is copied; the pieces' memory must not be
  /// written until wait_copied() has returned. Throws SaveFailed on all ranks (of the last save, or of this one), and
  /// then nothing has been begun or it has been given up.
  void save(State state);
  /// The same, whatever SaverOptions::asynchronous says.
  void save(State state, bool asynchronous);

  /// Saves that begin from now on go to `folder`, of which `keep` checkpoints stay, and are read back or not. All ranks
  /// alike; not collective.
  void set_target(os::Path folder, int keep, bool read_back = false);

  /// Rank 0 calls it on the thread that writes, before each commit; what it throws fails the save, FolderTaken for
  /// good. For saves that begin from now on; not collective.
  void set_fence(std::function<void()> fence) { fence_ = std::move(fence); }

  /// Returns when the pieces' memory may be written again. Never throws; returns at once if there is nothing to copy.
  void wait_copied();

  /// True if this rank's part of the save at hand has failed, or has not ended by the deadline. Never blocks.
  bool failed() const;
  /// True while this rank has something to write, or waits for others in order to commit. Never blocks.
  bool busy() const;

  /// Collective: waits until the save at hand is committed, if there is one. Throws SaveFailed on all ranks if it
  /// failed on any of them, a CommError if a rank is lost; either way it is waited for no more (but see leave()).
  void finish();

  /// Leaves the save at hand, if there is one, in a job of which a rank is lost, also after finish() has thrown
  /// CommError: this rank's part is written to its end, as far as 30 s (or the deadline) allow, and nobody is waited
  /// for. Where all parts are there already it may still be committed; else whoever goes on does that
  /// (commit_left_behind). A failure is logged. Not collective.
  void leave();

  /// Of the newest checkpoint that finish() or save() saw committed.
  std::optional<int64_t> saved_step() const { return saved_step_; }
  const SaverOptions& options() const { return options_; }
  std::chrono::nanoseconds waited() const { return waited_; }  ///< by the training thread in all of the calls above

 private:
  struct Task;
  class Save;

  void begin(State state, bool asynchronous);
  [[noreturn]] void give_up(const std::string& failure);

  std::shared_ptr<comm::Fabric> fabric_;
  SaverOptions options_;
  std::string job_;
  std::function<void()> fence_;
  int64_t count_ = 0;
  std::shared_ptr<Snapshot> snapshot_;  // made by the first asynchronous save
  std::unique_ptr<Save> save_;          // the save at hand
  std::unique_ptr<Save> abandoned_;     // one that was given up and has not ended yet
  std::optional<int64_t> saved_step_;
  std::chrono::nanoseconds waited_{0};
};

}  // namespace tesserae::checkpoint
