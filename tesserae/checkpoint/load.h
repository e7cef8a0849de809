#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/fabric.h"

namespace tesserae::checkpoint {

/// Fills `pieces` from a checkpoint of any layout and any split of its tensors; padding of pieces stays as it is. Every
/// byte is checked before it counts (Checkpoint::read); floating point types are converted where they differ. Memory
/// beyond the pieces: one block, and one more where types differ. Not collective: ranks read at the
/// same time, each what it needs. Throws InvalidArgument for a piece that the checkpoint does not have (unless it is
/// optional) or has in another shape, Damaged, IoError; pieces then hold anything.
void load(const Checkpoint& checkpoint, const std::vector<Piece>& pieces);

/// What fills the training state from an open checkpoint. Uses no collective: another rank may fail where this one does
/// not. What must be done together (publish_model) comes when the load has succeeded on all ranks.
using LoadInto = std::function<void(const Checkpoint& checkpoint)>;

/// Loads the newest checkpoint of `folder` that can be loaded on all ranks, and returns it; nothing if the folder has
/// none. Collective: rank 0 looks and tells the others. When a checkpoint is Damaged or unreadable on any rank, all
/// ranks warn and take the one before it. Throws the last failure if there are checkpoints and none can be loaded: a
/// run must not start from the beginning because its past cannot be read. What `into` throws besides is thrown.
/// `damaged`, if given: the checkpoints that were passed over, or could not be loaded at the end, because what was read
/// is not what was written; also filled when it throws.
std::optional<Checkpoint> load_newest(comm::Fabric& fabric, const os::Path& folder, const LoadInto& into,
                                      std::vector<os::Path>* damaged = nullptr);

/// Loads `path`: a checkpoint, or a folder of them (its newest). Collective. A failure on any rank is thrown on all.
Checkpoint load_chosen(comm::Fabric& fabric, const os::Path& path, const LoadInto& into);

}  // namespace tesserae::checkpoint
