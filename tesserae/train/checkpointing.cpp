#include "tesserae/train/checkpointing.h"

#include <utility>

#include "tesserae/base/log.h"
#include "tesserae/os/seconds.h"

// After a step, on all ranks alike:
//  1. if a rank has failed in the save at hand, that save is over on all of them;
//  2. a snapshot in memory, if one is due, or the run ends: who is ended in the middle of 3 goes on from that;
//  3. a checkpoint, if one is due: by steps, by rank 0's clock (told to all in the step's agreement), or because the
//     run ends after this step;
//  4. at the end: wait until it is committed.
namespace tesserae::train {

Checkpointing::Checkpointing(const config::Config& config, TrainingState& state, const RunFolders& folders,
                             Callbacks callbacks)
    : options_(config.checkpoint), state_(state), folder_(folders.checkpoints), callbacks_(std::move(callbacks)) {
  if (!options_.enabled()) return;
  saver_ = make_saver();
  if (const auto owner = folders.checkpoints_owner) saver_->set_fence([owner] { owner->require(); });
  if (options_.memory_every_steps > 0) {
    memory_.emplace(snapshot::Subject{state.mesh, state.sharded, *state.optimizer, state.buffers()}, state.layout(),
                    folder_, folders.identity, options_.memory_on_other_hosts);
  }
}

std::unique_ptr<checkpoint::Saver> Checkpointing::make_saver() const {
  return std::make_unique<checkpoint::Saver>(
      state_.fabric, checkpoint::SaverOptions{.folder = folder_,
                                              .keep = options_.keep,
                                              .asynchronous = options_.asynchronous,
                                              .read_back = options_.read_back,
                                              .deadline = os::milliseconds(60 * options_.deadline_minutes)});
}

void Checkpointing::begin(std::optional<os::TimePoint> last_save) {
  begun_ = announced_ = state_.step;
  last_save_ = last_save.value_or(os::now());
}

void Checkpointing::before_update() {
  if (!saver_) return;
  if (memory_) memory_->wait_copied();
  saver_->wait_copied();
}

void Checkpointing::layout_changed() {
  if (memory_) memory_->layout_changed(state_.layout());
}

void Checkpointing::settle() {
  before_update();
  if (!saver_) return;
  settle(/*ending=*/false);
  announce();
}

Checkpointing::Wishes Checkpointing::wishes() const {
  if (!saver_) return {};
  const std::chrono::duration<double, std::ratio<60>> passed = os::now() - last_save_;
  const bool time =
      state_.fabric->rank() == 0 && options_.every_minutes > 0 && passed.count() >= options_.every_minutes;
  return {.save = time ? 1.0 : 0.0, .failed = saver_->failed() ? 1.0 : 0.0};
}

bool Checkpointing::due(const Wishes& all) const {
  return all.save > 0 || (options_.every_steps > 0 && state_.step % options_.every_steps == 0);
}

void Checkpointing::after_step(const Wishes& all, bool ending) {
  if (!saver_) return;
  if (all.failed > 0) settle(ending);  // 1
  announce();
  if (memory_ && (ending || state_.step % options_.memory_every_steps == 0)) {  // 2
    memory_->save(state_.step, state_.description(), ending);
    if (ending) memory_->wait_copied();
  }
  if (ending || due(all)) save(ending);  // 3
}

void Checkpointing::settle(bool ending) {
  try {
    saver_->finish();
  } catch (const checkpoint::SaveFailed& failure) {
    fail(failure, ending);
  }
}

void Checkpointing::save(bool ending) {
  settle(ending);  // the save before this one may not be over; its failure is not this one's
  announce();
  if (callbacks_.before_save) callbacks_.before_save();
  last_save_ = os::now();
  save_begun_ = state_.step;
  try {
    saver_->save(state_.to_save(), options_.asynchronous && !ending);  // 4: at the end it returns when all is done
    begun_ = state_.step;
    if (announced_ == begun_) announced_.reset();  // of a step with which the run went on, whose save was still due
    ++figures_.saved;
    announce();
  } catch (const checkpoint::SaveFailed& failure) {
    fail(failure, ending);
  }
}

void Checkpointing::fail(const checkpoint::SaveFailed& failure, bool ending) {
  ++figures_.failed;
  if (save_begun_ == failure.step) save_begun_ = 0;
  if (begun_ == failure.step) begun_ = announced_;
  if (ending && failure.step == state_.step) {
    failure_ = std::current_exception();
    return;
  }
  if (!ending && (options_.stop_on_error || failure.taken)) throw;  // two runs do not write one folder
  if (state_.fabric->rank() == 0) log(LogLevel::error, cat(failure.what(), "; training goes on"));
}

void Checkpointing::keep() {
  if (callbacks_.before_save) callbacks_.before_save();
  const std::unique_ptr<checkpoint::Saver> own = saver_ ? nullptr : make_saver();
  (saver_ ? saver_ : own)->save(state_.to_save(), /*asynchronous=*/false);
  last_save_ = os::now();
  begun_ = state_.step;
  announce();
  if (memory_) memory_->remove();
}

/// Rank 0 is done with a save when it is committed.
void Checkpointing::announce() {
  if (begun_ == announced_ || (saver_ && (saver_->busy() || saver_->failed()))) return;
  announced_ = begun_;
  if (callbacks_.committed) callbacks_.committed(*begun_);
  if (callbacks_.say) callbacks_.say(cat("saved step ", *begun_, " in ", folder_.native()));
}

void Checkpointing::finish() {
  if (!saver_) return;
  if (failure_) std::rethrow_exception(failure_);
  if (memory_) memory_->remove();
}

Checkpointing::Figures Checkpointing::figures() const {
  Figures figures = figures_;
  if (saver_) figures.waited_seconds = std::chrono::duration<double>(saver_->waited()).count();
  if (memory_) figures.in_memory = memory_->figures();
  return figures;
}

}  // namespace tesserae::train
