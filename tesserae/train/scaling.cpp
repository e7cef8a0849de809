// How a run gets another number of ranks while it trains (`tesserae scale`). Those that stay keep their processes:
//
//  1. Rank 0's dial is asked, and refuses a number that cannot be. All ranks hear of another one in the sums of a step.
//  2. That step is finished, and saved as a checkpoint. Where that fails, the run goes on as it was.
//  3. Rank 0 leaves in the launcher's store what those need to know who come, and then asks for their number. All agree
//     that it has.
//  4. Every rank gives up its state and its connections, and waits for the next epoch. The launcher starts the ranks
//     that are missing and begins it; ranks that have no place in it hear so, and end.
//  5. The others meet the new ones, and are as new themselves: the configuration is made for their number (job_size.h),
//     the state comes from the checkpoint.
//  6. All have it: rank 0 takes back what it left in 3. The run goes on.
//
// A rank that is lost before 3 is a loss as any other, and nobody scales. From then on the next epoch has the new
// number: where lost ranks are replaced, that begins 5 again; where the job may have fewer, fewer_ranks.cpp asks in 3
// for another number; else the job ends.

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/comm/agree.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/device.h"
#include "tesserae/train/job_size.h"
#include "tesserae/train/recovery.h"
#include "tesserae/train/run.h"

namespace tesserae::train {

// 1. Rank 0's.

std::string Run::cannot_scale(int ranks) const {
  if (!membership_.served()) {
    return "`tesserae train --nproc` changes the number of those ranks only that it has started, two or more on one "
           "host; end the job and go on with --resume auto and more or fewer ranks";
  }
  if (fabric_ != nullptr && ranks > fabric_->size()) {
    if (fabric_->world().hosts() > 1) {
      return cat("a job on several hosts gets no more ranks than the ", fabric_->size(), " that it has");
    }
    if (std::string lacking = lacks_device(config_.run.device, ranks); !lacking.empty()) return lacking;
  }
  // A new process begins with what the job was launched with.
  const std::string now = why_not(written_, written_for_, ranks);
  return now.empty() ? why_not(launched_, written_for_, ranks) : now;
}

// 2, 3, 4.

/// The state as a checkpoint, from which the run goes on in another form. False: it could not be saved, and who asked
/// is told.
bool Run::keep_for_change() {
  checkpoints_->settle();
  try {
    checkpoints_->keep();
    saved_ = state_->step;
    return true;
  } catch (const checkpoint::SaveFailed& failure) {
    dial_->refuse(*std::exchange(scaling_, std::nullopt), failure.what());
    return false;
  }
}

/// Of keep_for_change(), on rank 0. The folder may have later ones, which this run does not continue.
std::string Run::last_kept() const {
  const std::optional<checkpoint::Committed> kept = checkpoint::last_of_step(folders_->checkpoints, saved_);
  if (kept) return kept->path.native();
  throw IoError("train", cat("step ", saved_, ", which was just saved in ", folders_->checkpoints.native(),
                             ", is not there any more"));
}

/// At the end of a step. False: that cannot be, and the run goes on as it was.
bool Run::leave_for_scaling() {
  scaling_began_ = os::now();
  if (!keep_for_change()) return false;
  nlohmann::json told;
  if (leads()) {
    told = told_to(scaling_->ranks, tell());
    told["checkpoint"] = last_kept();
  }
  ask_for_ranks(scaling_->ranks, told);
  dial_server_ = dial_->hand_over();
  leave("the number of ranks changes");
  return true;
}

void Run::leave(const std::string& why) {
  end_services(why);
  give_up_state();
  pending_ = false;
  monitor_.reset();
  fabric_.reset();
}

/// What a new rank 0 needs, too: what was told of the state as it is, for so many ranks.
nlohmann::json Run::told_to(int ranks, nlohmann::json told) const {
  const auto state_ranks = [](const mesh::Mesh& mesh, int of) {
    return mesh::Mesh(of, mesh.degrees()).degree(mesh::axes::state);
  };
  const mesh::Strategy now = strategy_from(told.at("strategy"), setup_.strategy);
  const auto as_configured = [&](const config::Config& config, int of) {
    return config::strategy_of(config, state_ranks(setup_.mesh, of));
  };
  mesh::Strategy strategy = as_configured(for_ranks(written_, written_for_, ranks), ranks);
  // What the dial was turned to stays, as nearly as can be.
  const int before = setup_.mesh.ranks();
  if (now.degrees != as_configured(config_, before).degrees) {
    strategy = mesh::with_degrees(now, nearest_degrees(now.degrees, state_ranks(setup_.mesh, ranks)));
  }
  told["strategy"] = strategy_json(strategy, dial::tiers_from(told["strategy"]["offload"]), told["strategy"]["choice"]);
  told["scaling"] = {{"step", told.at("step")}, {"from", before}, {"to", ranks}};
  return told;
}

/// `told`: rank 0's; null: the run has not begun. Collective.
void Run::ask_for_ranks(int ranks, const nlohmann::json& told) {
  if (leads()) {
    if (!told.is_null()) membership_.remember("scaling", told.dump());
    membership_.ask_for_ranks(ranks);
    if (output_) output_->clear_line();
  }
  comm::lowest_rank_with(*fabric_, false);
}

// 5.

/// The launcher has begun an epoch with another number of ranks.
void Run::change_size() {
  const int ranks = membership_.ranks();
  if (fabric_ != nullptr) leave("a rank was lost");  // between 3 and 4
  config_ = for_ranks(written_, written_for_, ranks);
  setup_ = set_up_job(config_, ranks, setup_.device);  // also of a process that has another number now
  world_ = membership_.world();
}

/// What rank 0 left in 3 for as many ranks as have met now; null: nothing. Collective.
nlohmann::json Run::scaling_at_hand() {
  const std::string text = remembered("scaling");
  nlohmann::json told = text.empty() ? nullptr : nlohmann::json::parse(text);
  if (told.is_null() || told.at("scaling").at("to") == fabric_->size()) return told;
  if (leads()) membership_.remember("scaling", "");
  return nullptr;
}

/// Ranks have met in a number that is not what was asked for: one was lost before 3, or is not replaced, or the
/// launcher can start no more.
void Run::forget_scaling(const std::string& why) {
  const auto asked = std::exchange(scaling_, std::nullopt);
  if (!asked || !dial_server_) return;
  if (asked->experts > 0) {
    dial_server_->tell(asked->client, dial::error_event(cat("a rank was lost meanwhile; experts are shared out over ",
                                                            expert_degree(), " ranks")));
    return;
  }
  dial_server_->tell(asked->client, dial::error_event(cat("the job keeps its ", fabric_->size(), " ranks: ", why)));
}

// 5, 6.

void Run::take_up(const nlohmann::json& told, Standing all, os::TimePoint begin) {
  hear(told);
  whole_ = false;
  nlohmann::json scaling = told.at("scaling");
  const Resume kept{.mode = Resume::Mode::path, .path = told.at("checkpoint").get<std::string>()};
  record_ = {};
  save_begun_ = 0;
  remember(strategy_key, told.at("strategy").dump());
  if (kept.path.empty()) {  // of what lost ranks held there was no copy
    all.step = scaling.at("step");
    scaling["back"] = go_back(all);
    scaling["steps_back"] = std::max<int64_t>(all.step - state_->step, 0);
  } else {
    take_strategy(told.at("strategy"));
    make_state(TrainingState::Values::zeros);
    make_services();
    origin_ = restore(*state_, kept, *folders_, checkpoints_->memory());
    checkpoints_->begin(last_save_);
    whole_ = true;
    pending_ = told.value("pending", false);
    record_ = from_line(told.at("record").get<std::string>()).value_or(StepRecord());
    scheduled_until_ = state_->step;
    output_.reset();  // the configuration is that of another number of ranks
    if (leads()) begin_output(origin_);
  }
  scaling["step"] = state_->step;
  const double seconds = os::seconds_since(scaling_began_.value_or(begin));
  scaling["seconds"] = seconds;
  scalings_.push_back(scaling);
  const auto asked = std::exchange(scaling_, std::nullopt);
  if (!leads()) return;
  membership_.remember("scaling", "");
  const std::string left = scaling.contains("left") ? cat(", ", scaling["left"].get<int>(), " were left,") : "";
  const std::string from_to = cat(scaling.at("from").get<int>(), " -> ", scaling.at("to").get<int>(), " ranks", left);
  const std::string back =
      scaling.contains("back") ? cat(", ", scaling["steps_back"].get<int64_t>(), " steps back") : "";
  output_->say(cat("step ", state_->step, ": ", from_to, " in ", seconds, " s", back));
  tell("scale", cat("the job has ", from_to, " now"));
  if (!dial_server_ || !asked) return;
  dial::Json event = {{"event", "scaled"}, {"degrees", dial::to_json(setup_.strategy.degrees)}};
  event.update(dial::Json::parse(scaling.dump()));
  dial_server_->tell(asked->client, event);
}

}  // namespace tesserae::train
