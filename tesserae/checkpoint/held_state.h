#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/os/files.h"

namespace tesserae::checkpoint {

/// The training state after a step where it lives, as one rank holds it, for those that go on when other ranks are
/// lost: what several ranks hold alike, each of them names here. Only what forward changes is copied.
///
///   HeldState held(*fabric, state, own);      // all ranks, after a step
///   ...                                       // until that memory changes: before the next optimizer step
///   save_held(fewer, &held, folder, keep);    // ranks are lost, and those that are left have met again
///
/// held_state.cpp opens with how. Tensors that an engine has made live on here when it is gone.
class HeldState {
 public:
  /// `state`: all pieces that this rank holds, `written` those that it saves in a whole job; of a tensor of which it
  /// holds nothing an empty one, so that a tensor that nobody has any more is noticed. `own`: what this rank alone has
  /// (random numbers), under names of its own: values that stay, contiguous, on the host; the next rank gets a copy,
  /// on several hosts one of another.
  /// Collective. Throws CommError.
  HeldState(comm::Fabric& fabric, State state, std::vector<Piece> own);

  /// What Saver::save() takes.
  const State& state() const { return state_; }

  /// Of how many ranks the job was, and what of which of these is here that each alone has.
  int ranks() const { return ranks_; }
  const std::vector<int>& owners() const { return owners_; }

 private:
  State state_;
  int ranks_;
  std::vector<int> owners_;
};

/// Saves the newest state of which the ranks hold everything together, if it is newer than what `folder` has, whatever
/// ranks there were when it was held. A save that nobody has committed there counts, if it was written whole: it is
/// committed first. `held`: nullptr on ranks that have come since, or hold nothing. Collective. Returns its step;
/// nothing: there is no such state. Throws SaveFailed, CommError.
std::optional<int64_t> save_held(const std::shared_ptr<comm::Fabric>& fabric, const HeldState* held,
                                 const os::Path& folder, int keep);

}  // namespace tesserae::checkpoint
