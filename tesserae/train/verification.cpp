// Whether the ranks that hold the same part of the state still have the same bytes (shard/replica_check.h), and what
// becomes of a run where they have not. Before a checkpoint, which should not keep what is wrong.

#include <algorithm>

#include "tesserae/base/log.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/run.h"

namespace tesserae::train {

void Run::warn_if_nothing_is_compared() {
  if (config_.recovery.check_replicas_every_steps == 0 || shard::has_replicas(state_->sharded.engine())) return;
  if (!leads()) return;
  log(LogLevel::warning, cat("recovery.check_replicas_every_steps: no part of the state has a replica at ",
                             to_string(state_->setting()), ", so nothing is compared"));
}

void Run::check_replicas() {
  const int64_t every = config_.recovery.check_replicas_every_steps;
  if (every == 0 || state_->step % every != 0 || !shard::has_replicas(state_->sharded.engine())) return;
  const os::TimePoint begin = os::now();
  const shard::ReplicaReport found = state_->sharded.compare_replicas();
  record_.replica_check_ms = 1e3 * os::seconds_since(begin);
  if (found.suspects.empty()) {
    agreed_ = state_->step;
    return;
  }
  const std::string what = cat("after step ", state_->step, " the state of replicas differs: ", found.text);
  differing_.push_back({{"step", state_->step}, {"ranks", found.suspects}, {"what", found.text}});
  std::vector<bool> whole(static_cast<size_t>(fabric_->size()), true);
  for (const int rank : found.suspects) whole[static_cast<size_t>(rank)] = false;
  const auto reference = std::ranges::find(whole, true);
  const bool filled = found.decided && reference != whole.end() && [&] {
    checkpoints_->before_update();  // nobody copies what is written
    return state_->fill(whole, static_cast<int>(reference - whole.begin()), /*keeps_own=*/true);
  }();
  tell("corruption", what);
  if (!filled) {
    // What a checkpoint of step `agreed_` holds was copied after the comparison.
    throw ReplicasDiffer(
        "train",
        cat(what, found.decided ? ". No rank has all that these lack" : ". Nothing says which are right",
            agreed_ > 0
                ? cat(". They agreed after step ", agreed_, ": go on from a checkpoint of before that step")
                : ". This process has not seen them agree: begin as it did, on all hosts with the same data and "
                  "version",
            ", without the hosts of these ranks if it happens again"));
  }
  if (leads()) {
    log(LogLevel::error,
        cat(what, ". These ranks have the bytes of the others again; look at their memory and devices"));
  }
}

}  // namespace tesserae::train
