// What a run does with a step whose numbers are bad, which has updated nothing (optim/bad_steps.h). All ranks know of
// it from the sums of the step, and do the same:
//
//  1. They find out where it began, and rank 0 says so.
//  2. skip: the step stays left out. After `limit` of them in a row the run ends, as with `stop`.
//  3. rollback: the state becomes that of the newest snapshot in memory or checkpoint, but for the position in the
//     data, which stays behind the bad step. A save at hand is waited for before: it is of this run, and may be the
//     newest. Lines of the steps that are undone go from the metrics; a turn of the dial that was agreed on is done.
//     After `limit` rollbacks, the run ends. Where nothing has been kept yet, 2.
//  4. stop, and what ends the run in 2 and 3: the state is saved, the summary written, and BadNumbers thrown.

#include <utility>

#include <algorithm>

#include "tesserae/base/log.h"
#include "tesserae/comm/agree.h"
#include "tesserae/train/run.h"

namespace tesserae::train {

using Policy = config::Config::BadSteps::Policy;

/// Step 4 of a step. False: the run has gone back, and the next step is another one.
bool Run::leaves_out_bad_step() {
  const Policy policy = config_.bad_steps.policy;
  const int64_t limit = config_.bad_steps.limit;
  const std::string where = optim::where_not_finite(*fabric_, own_loss_, state_->sharded.shards());  // 1
  const std::string what = cat("step ", record_.step, ": ", record_.bad, where.empty() ? "" : cat(" (", where, ")"));
  nlohmann::json entry = {{"step", record_.step}, {"why", record_.bad}};
  if (!where.empty()) entry["where"] = where;
  std::string ends;
  if (policy == Policy::stop) {
    ends = "bad_steps.policy is \"stop\"";
  } else if (policy == Policy::rollback && state_->bad_steps.rollbacks() >= limit) {
    ends = cat("the run has gone back ", limit, " times, which bad_steps.limit allows");
  } else if (policy == Policy::rollback && stopped_by_ == 0 && roll_back(what, entry)) {  // 3
    return false;
  } else if (state_->bad_steps.in_a_row() >= limit) {
    ends = cat("that makes ", limit, " bad steps in a row, which is bad_steps.limit");
  }
  entry["then"] = ends.empty() ? "skipped" : "stopped";
  if (bad_steps_.empty() || bad_steps_.back() != entry)
    bad_steps_.push_back(entry);  // a lost rank makes us say it again
  if (!ends.empty()) {
    broken_off_ = cat(what, "; ", ends, ". Nothing was updated with it");
  } else if (leads()) {
    log(LogLevel::warning, cat(what, ": nothing was updated"));
  }
  tell("bad step", cat(what, ends.empty() ? ": nothing was updated" : ": the run ends"));
  return true;
}

bool Run::roll_back(const std::string& what, nlohmann::json& entry) {
  const int64_t from = state_->step, rollbacks = state_->bad_steps.rollbacks() + 1;
  const data::Position behind = state_->position;
  checkpoints_->settle();
  whole_ = false;
  const std::optional<Origin> to = newest_of_this_run(from);
  whole_ = true;
  if (!to) return false;
  state_->position = behind;
  state_->bad_steps.went_back(rollbacks);
  entry["then"] = "rolled back";
  entry["to"] = to->step;
  bad_steps_.push_back(entry);
  rolled_back_from_ = from;
  agreed_ = std::min(agreed_, to->step);
  scheduled_until_ = -1;
  record_ = {};  // of a step that is undone
  pending_ = false;
  tell("bad step", cat(what, ": back to step ", to->step));
  if (output_) {
    output_->go_back(to->step);
    output_->say(cat(what, ": back to step ", to->step, " from ", to->from, ", without the data since then"));
  }
  if (turn_to_) turn_dial(*turn_to_);
  turn_to_.reset();
  if (monitor_) monitor_->timer().go_back(to->step);
  return true;
}

/// Ends the checkpoints; what the last of them holds, as people read it.
std::string Run::end_of_bad_run() {
  if (!config_.checkpoint.enabled()) return "nothing is saved, since the section checkpoint asks for nothing";
  try {
    checkpoints_->finish();
  } catch (const checkpoint::SaveFailed& failure) {
    return cat("the state before it is not saved: ", failure.what());
  }
  return cat("the state before it is saved in ", folders_->checkpoints.native(),
             ", from which --resume auto goes on with the data behind it");
}

}  // namespace tesserae::train
