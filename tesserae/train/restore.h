#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tesserae/train/resume.h"
#include "tesserae/train/training_state.h"

namespace tesserae::snapshot {
class MemoryTier;
}

namespace tesserae::train {

/// What a run continues.
struct Origin {
  int64_t step = 0;
  std::string from;        ///< for people: a checkpoint, or memory
  bool in_memory = false;  ///< what it continues is in memory of the hosts, not in storage
};

/// Fills `state` as `resume` says, from memory (`memory` may be nullptr: there is none) if it has a later step than
/// what storage has undamaged, or the same. Checkpoints that are found damaged are set aside. Collective. Nothing:
/// there is nothing to continue, and `state` is as it was. Throws what checkpoint::load_newest and load_chosen throw.
std::optional<Origin> restore(TrainingState& state, const Resume& resume, const RunFolders& folders,
                              snapshot::MemoryTier* memory);

}  // namespace tesserae::train
