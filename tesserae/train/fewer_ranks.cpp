// How a run goes on with fewer ranks, where nobody takes the place of a lost one:
//
//  1. The launcher has told those that are left their new numbers. They give up the connections of before, and meet in
//     a fabric of their own; the state stays as it is, sharded over the ranks that there were.
//  2. They end the broken step and agree on who has a whole state, of which step, as in recovery.cpp (2 and 3). Those
//     behind carry out the update, too (4 and 5).
//  3. If they hold every part, each writes what it is the first to hold to a checkpoint, whatever the layout was. If
//     not, what comes in 5 goes back: to the newest snapshot in memory, or checkpoint, or to the beginning.
//  4. They ask for the largest number of ranks that the job can have and that are left. That may be fewer: then those
//     of the highest numbers have no place, but what they held is in the checkpoint.
//  5. From here on it is scaling.cpp, 3 to 6.
//
// Another loss before that is over begins at 1 again, with the ranks that are left then: from what was kept in 3, if
// rank 0 has said so. It asks for no more than was asked for then.

#include <algorithm>
#include <string>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/comm/agree.h"
#include "tesserae/comm/give_up.h"
#include "tesserae/snapshot/snapshot_set.h"
#include "tesserae/train/recovery.h"
#include "tesserae/train/run.h"

namespace tesserae::train {

void Run::go_on_with_fewer() {
  scaling_began_ = os::now();
  // 1.
  world_ = membership_.world();
  if (fabric_ != nullptr) comm::give_up(*fabric_);
  fabric_.reset();  // the state keeps its own
  connect();
  end_broken_step();  // 2
  hear_of_experts();
  const Standing all = agree_on_standing();
  forget_scaling("a rank was lost meanwhile");
  const std::string text = remembered("scaling");
  nlohmann::json told = text.empty() ? nullptr : nlohmann::json::parse(text);
  const int most = told.is_null() ? fabric_->size() : told.at("scaling").at("to").get<int>();
  const int ranks = ranks_for_those_left(most);
  // A launcher that has taken over may know of one that is over: those left are beyond its step.
  const bool over = !told.is_null() && all.reference >= 0 && all.step > told.at("scaling").at("step").get<int64_t>();
  if (all.begun && (told.is_null() || over)) {
    folders_ = join_folders(*fabric_, config_, resume_, all.run, folders_);
    told = what_those_left_tell(all);
  }
  if (!told.is_null()) {
    told = told_to(ranks, std::move(told));
    told["scaling"]["left"] = fabric_->size();
  }
  ask_for_ranks(ranks, told);  // 4
  leave("ranks were lost");
}

/// Of those that are left, and no more than `most`.
int Run::ranks_for_those_left(int most) const {
  const int left = fabric_->size(), least = std::max(config_.recovery.min_ranks, 1);
  for (int ranks = std::min(left, most); ranks >= least; --ranks) {
    if (cannot_scale(ranks).empty()) return ranks;
  }
  throw StateLost("train",
                  cat("ranks were lost and not replaced, and the job can have none of ", least, " to ", left,
                      " ranks: ", cannot_scale(left), " (recovery.min_ranks is ", config_.recovery.min_ranks, ")"));
}

/// What those need who go on, before it is known how many.
nlohmann::json Run::what_those_left_tell(const Standing& all) {
  nlohmann::json told;
  if (all.reference >= 0) {
    told = hear_of_reference(all);
    told["checkpoint"] = keep_what_is_left(all, told);
  } else {
    told = past();
    told["strategy"] = nlohmann::json::parse(remembered(strategy_key));
    told["checkpoint"] = "";
  }
  told["step"] = all.step;
  told["pending"] = all.pending;
  if (told["checkpoint"].get<std::string>().empty()) require_saved("a lost rank", all);
  return told;
}

/// Step 3. Returns the checkpoint, on rank 0; empty: there is none, on all ranks.
std::string Run::keep_what_is_left(const Standing& all, const nlohmann::json& told) {
  const bool own = all.whole[static_cast<size_t>(fabric_->rank())];
  std::vector<int64_t> counts(static_cast<size_t>(setup_.mesh.ranks()), 0);
  if (own) {
    catch_up(all, told);
    counts[static_cast<size_t>(state_->fabric->rank())] = 1;
  }
  counts = comm::counts_over_ranks(*fabric_, counts);
  std::vector<bool> left;
  for (const int64_t count : counts) left.push_back(count > 0);
  const mesh::Degrees degrees = strategy_from(told.at("strategy"), setup_.strategy).degrees;
  const mesh::Layout layout(setup_.mesh.degree(mesh::axes::state), degrees);
  if (!snapshot::hold_everything(setup_.mesh, layout, left)) return "";

  checkpoint::State kept = own ? state_->to_save_of(left) : checkpoint::State{};
  kept.step = all.step;
  kept.layout = {fabric_->size(), {.parameters = 1, .gradients = 1, .optimizer = 1}};
  kept.training = told.at("description");
  checkpoint::Saver saver(fabric_, {.folder = folders_->checkpoints,
                                    .keep = config_.checkpoint.keep,
                                    .deadline = os::milliseconds(60 * config_.checkpoint.deadline_minutes)});
  if (const auto owner = folders_->checkpoints_owner) saver.set_fence([owner] { owner->require(); });
  try {
    saver.save(std::move(kept));
  } catch (const checkpoint::SaveFailed& failure) {
    if (leads()) log(LogLevel::warning, cat("what is left in memory is lost: ", failure.what()));
    return "";
  }
  saved_ = all.step;
  if (!leads()) return "kept";
  membership_.remember("saved", cat(saved_));
  const std::optional<checkpoint::Committed> committed = checkpoint::last_of_step(folders_->checkpoints, saved_);
  return committed ? committed->path.native() : "";
}

}  // namespace tesserae::train
