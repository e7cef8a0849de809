#include "tesserae/train/restore.h"

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

}  // namespace

std::optional<Origin> restore(TrainingState& state, const Resume& resume, const RunFolders& folders,
                              snapshot::MemoryTier* memory) {
  comm::Fabric& fabric = *state.fabric;
  const checkpoint::LoadInto into = [&state](const checkpoint::Checkpoint& checkpoint) { state.load(checkpoint); };
  std::optional<Origin> origin;
  if (resume.mode == Resume::Mode::automatic && memory != nullptr) {
    if (const auto restored = memory->restore(newest_step(fabric, folders.checkpoints))) {
      state.take_over(restored->description, restored->step);
      origin = {.step = restored->step, .from = "memory of the hosts"};
    }
  } else if (memory != nullptr) {
    memory->remove_all();
  }
  if (resume.mode == Resume::Mode::automatic && !origin) {
    if (const auto loaded = checkpoint::load_newest(fabric, folders.checkpoints, into)) {
      origin = {.step = loaded->step(), .from = loaded->path().native()};
    }
  }
  if (resume.mode == Resume::Mode::path) {
    const checkpoint::Checkpoint loaded = checkpoint::load_chosen(fabric, resume.path, into);
    origin = {.step = loaded.step(), .from = loaded.path().native()};
  }
  if (origin) state.publish();
  return origin;
}

}  // namespace tesserae::train
