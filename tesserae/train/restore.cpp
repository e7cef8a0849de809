#include "tesserae/train/restore.h"

#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/comm/agree.h"
#include "tesserae/snapshot/memory_tier.h"

namespace tesserae::train {
namespace {

/// The step of the newest checkpoint as rank 0 sees the folder, on all ranks; -1: there is none.
int64_t newest_step(comm::Fabric& fabric, const os::Path& folder) {
  int64_t step = 0;
  if (fabric.rank() == 0) {
    try {
      const auto committed = checkpoint::list_checkpoints(folder);
      if (!committed.empty()) step = committed.back().step + 1;
    } catch (const IoError&) {
      // Loading will say so.
    }
  }
  return comm::counts_over_ranks(fabric, {step})[0] - 1;
}

/// Puts checkpoints that are damaged out of the way, so that they do not count as some of those to keep. Rank 0's.
void set_aside(const std::vector<os::Path>& damaged) {
  for (const os::Path& path : damaged) {
    try {
      log(LogLevel::warning, cat(path.native(), " is damaged: it is kept as ", checkpoint::set_aside(path).native()));
    } catch (const IoError& error) {
      log(LogLevel::warning, cat(path.native(), " is damaged and stays where it is: ", error.what()));
    }
  }
}

/// How `resume auto` goes on, in this order:
///  1. from memory, if what is there is as late as the newest checkpoint;
///  2. from the newest checkpoint that can be loaded; snapshots of another layout are made one first;
///  3. if it is not the newest in the folder, from what is in memory after all, in the same two ways, if it is as late.
/// Damaged checkpoints are set aside once there is something to go on from.
class Automatic {
 public:
  Automatic(TrainingState& state, const os::Path& folder, snapshot::MemoryTier* memory)
      : state_(state), fabric_(*state.fabric), folder_(folder), memory_(memory) {}

  std::optional<Origin> restore() {
    const int64_t newest = newest_step(fabric_, folder_);
    if (auto origin = from_memory(newest)) return origin;  // 1
    save_surviving(newest);                                // 2
    std::optional<Origin> origin;
    std::exception_ptr failure;
    try {
      origin = from_storage();
    } catch (const Corruption&) {
      failure = std::current_exception();
    } catch (const IoError&) {
      failure = std::current_exception();
    }
    if (failure || (origin && origin->step < newest)) {  // 3
      const int64_t reached = origin ? origin->step : 0;
      if (auto later = from_memory(reached)) {
        origin = later;
      } else if (save_surviving(reached)) {
        origin = from_storage();
      } else if (failure) {
        std::rethrow_exception(failure);
      }
    }
    if (fabric_.rank() == 0) set_aside(damaged_);
    return origin;
  }

 private:
  std::optional<Origin> from_memory(int64_t at_least) {
    if (memory_ == nullptr) return std::nullopt;
    const auto restored = memory_->restore(at_least);
    if (!restored) return std::nullopt;
    state_.take_over(restored->description, restored->step);
    return Origin{.step = restored->step, .from = "memory of the hosts", .in_memory = true};
  }

  /// Whether there is a checkpoint now that was not there before.
  bool save_surviving(int64_t after) { return memory_ != nullptr && memory_->save_surviving(after).has_value(); }

  std::optional<Origin> from_storage() {
    damaged_.clear();
    const auto into = [this](const checkpoint::Checkpoint& checkpoint) { state_.load(checkpoint); };
    const auto loaded = checkpoint::load_newest(fabric_, folder_, into, &damaged_);
    if (!loaded) return std::nullopt;
    return Origin{.step = loaded->step(), .from = loaded->path().native()};
  }

  TrainingState& state_;
  comm::Fabric& fabric_;
  const os::Path folder_;
  snapshot::MemoryTier* memory_;
  std::vector<os::Path> damaged_;
};

}  // namespace

std::optional<Origin> restore(TrainingState& state, const Resume& resume, const RunFolders& folders,
                              snapshot::MemoryTier* memory) {
  std::optional<Origin> origin;
  if (resume.mode == Resume::Mode::automatic) origin = Automatic(state, folders.checkpoints, memory).restore();
  if (resume.mode == Resume::Mode::path) {
    const auto into = [&state](const checkpoint::Checkpoint& checkpoint) { state.load(checkpoint); };
    const checkpoint::Checkpoint loaded = checkpoint::load_chosen(*state.fabric, resume.path, into);
    origin = {.step = loaded.step(), .from = loaded.path().native()};
  }
  // What is in memory and was not gone on from is of no run any more.
  if (memory != nullptr && !(origin && origin->in_memory)) memory->remove_all();
  if (origin) state.publish();
  return origin;
}

}  // namespace tesserae::train
