#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tesserae/checkpoint/saver.h"
#include "tesserae/os/clock.h"
#include "tesserae/snapshot/memory_tier.h"
#include "tesserae/train/resume.h"
#include "tesserae/train/training_state.h"

namespace tesserae::train {

/// When a run saves, where to, and what becomes of it when that fails: the configuration's section `checkpoint`. All
/// ranks have one and call it alike, from the training thread. With checkpoints switched off all of it does nothing.
///
///   forward, backward;
///   checkpoints.before_update();
///   optimizer.step();
///   all = sum over ranks of checkpoints.wishes();      // with whatever else the ranks agree on
///   ++state.step;
///   checkpoints.after_step(all, ending);
///   ...
///   checkpoints.finish();
class Checkpointing {
 public:
  /// What a rank adds to the agreement of a step.
  struct Wishes {
    double save = 0;    ///< it is time to
    double failed = 0;  ///< this rank could not write what is being saved
  };
  /// Rank 0's: before a save begins, and to tell people.
  struct Callbacks {
    std::function<void()> before_save;
    std::function<void(const std::string&)> say;
    std::function<void(int64_t step)> committed = {};
  };

  /// Collective if checkpoints are switched on. `config` and `state` outlive it.
  Checkpointing(const config::Config& config, TrainingState& state, const RunFolders& folders, Callbacks callbacks);

  /// nullptr unless the configuration asks for it.
  snapshot::MemoryTier* memory() { return memory_ ? &*memory_ : nullptr; }
  /// The state has just been restored (or is new): nothing is to be saved before the next step. `last_save`: of a run
  /// that goes on after a loss, if it is known.
  void begin(std::optional<os::TimePoint> last_save = {});
  os::TimePoint last_save() const { return last_save_; }
  /// The step of the last save that was begun and has not failed, whether or not it is committed; 0: there was none.
  int64_t save_begun() const { return save_begun_; }

  /// Returns when parameters and the optimizer's state may be written, or move.
  void before_update();
  /// The state has another layout now: what is kept from here on is of that. before_update() came before.
  void layout_changed();
  /// Collective. Waits until the save at hand is over, for good or not: the state becomes an earlier one. Throws as
  /// after_step() does.
  void settle();
  Wishes wishes() const;
  /// Saves what is due; `ending`: this was the last step of this process, which is always saved, and waited for.
  /// Throws SaveFailed on all ranks if the configuration says that a failure stops the run; a failure at the end is
  /// kept for finish().
  void after_step(const Wishes& all, bool ending);

  /// Saves the last step and waits until that is committed, also where checkpoints are switched off; takes away what is
  /// in memory. For ranks that are about to give up their state; settle() came before. Collective. Throws SaveFailed on
  /// all ranks, and then the run can go on.
  void keep();

  /// True if the last step is in a checkpoint that is committed.
  bool saved() const { return saver_ && saver_->saved_step() == state_.step; }
  /// The end, after everything else: gives back what is in memory, throws SaveFailed if the last step was not saved.
  void finish();

  /// Figures of this process for the summary.
  struct Figures {
    int64_t saved = 0;
    int64_t failed = 0;
    double waited_seconds = 0;                               ///< by training
    std::optional<snapshot::MemoryTier::Figures> in_memory;  ///< unset: nothing is kept there
  };
  Figures figures() const;

 private:
  std::unique_ptr<checkpoint::Saver> make_saver() const;
  bool due(const Wishes& all) const;
  void save(bool ending);
  void settle(bool ending);
  void fail(const checkpoint::SaveFailed& failure, bool ending);
  void announce();

  const config::Config::Checkpoint& options_;
  TrainingState& state_;
  os::Path folder_;
  Callbacks callbacks_;
  std::unique_ptr<checkpoint::Saver> saver_;  // nullptr: switched off
  std::optional<snapshot::MemoryTier> memory_;
  std::optional<int64_t> begun_;      // the newest step that was handed to the saver, or from which the run started
  std::optional<int64_t> announced_;  // the newest of which people were told
  int64_t save_begun_ = 0;
  os::TimePoint last_save_ = os::now();
  Figures figures_;
  std::exception_ptr failure_;  // of the save at the end
};

}  // namespace tesserae::train
