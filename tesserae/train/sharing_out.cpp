// How a run shares its experts out over another number of ranks while it trains (`tesserae dial --expert`). Ranks keep
// their processes and connections:
//
//  1. Rank 0's dial is asked, and refuses a degree that cannot be or for which there is no room. All ranks hear of
//     another one in the sums of a step.
//  2. That step is finished. Every rank makes a second state, for the other mesh (what each of them holds of every
//  expert
//     is another), and gets it from what the others have, through memory that all see (checkpoint/handover.h).
//  3. All agree that they have it. Rank 0 leaves the degree in the launcher's store, for those who come in the place of
//     lost ranks. All agree that it has, and remember the degree themselves.
//  4. Every rank gives up the first state.
//
// A rank that is lost before 3 is a loss as any other: those that are left have the first state still, and the degree
// stays. From then on whoever meets hears of the degree, from a rank that remembers it or from the store, and all that
// are left have the second state (hear_of_experts).
//
// Where ranks are on several hosts or have their state on a device or a disk, or there is no memory for two states, 2
// to 4 go through a checkpoint: it is saved (where that fails, the run goes on as it was), rank 0 leaves the degree in
// the store, every rank gives up its state, makes the other, and fills it from the checkpoint. Whoever meets later does
// the same (step 7 of recovery.cpp).

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/handover.h"
#include "tesserae/comm/agree.h"
#include "tesserae/cost/fabric_facts.h"
#include "tesserae/cost/memory.h"
#include "tesserae/cost/place_memory.h"
#include "tesserae/dial/facts.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/dial_setup.h"
#include "tesserae/train/job_size.h"
#include "tesserae/train/run.h"

namespace tesserae::train {
namespace {

constexpr const char* degree_key = "expert_parallel_degree";

mesh::Mesh mesh_with_experts(const mesh::Mesh& mesh, int degree) {
  mesh::AxisDegrees degrees = mesh.degrees();
  degrees.expert = degree;
  return mesh::Mesh(mesh.ranks(), degrees);
}

}  // namespace

int Run::expert_degree() const {
  return setup_.model.experts > 0 ? setup_.mesh.degree(mesh::Axis::expert) : 0;
}

// 1. Rank 0's.

std::string Run::cannot_share_out(int degree) const {
  try {
    with_experts(written_, degree);  // throws where the model has none
    experts::experts_of_rank(setup_.model.experts, degree);
    mesh_with_experts(setup_.mesh, degree);
    return "";
  } catch (const config::ConfigError& error) {
    return config::without_function(error);
  } catch (const InvalidArgument& error) {
    return config::without_function(error);
  }
}

// 2, 3, 4.

/// Memory through which the ranks can hand each other their state; undefined where that is not the way. Collective.
at::Tensor Run::window_for_experts(int degree) {
  comm::Group& everyone = fabric_->everyone();
  const bool possible = fabric_->size() > 1 && fabric_->device().is_cpu() && everyone.can_share() &&
                        !state_->setting().tiers.uses(offload::Tier::disk);
  if (comm::lowest_rank_with(*fabric_, !possible) >= 0) return {};
  cost::Facts then = dial::shared_out(dial_options(config_, *state_, folders_->run, links_, {}).facts, degree);
  then.shared_copy = cost::ranks_can_share(*fabric_);
  const double needed = cost::memory_of(then, state_->setting().degrees);
  const double free = cost::fullest_place(*fabric_).free;
  if (comm::lowest_rank_with(*fabric_, needed + checkpoint::Handover::window_bytes > free) >= 0) return {};
  return everyone.share(checkpoint::Handover::window_bytes);
}

/// At the end of a step. True: what that step still lacks is done, too; else what it would have been without.
bool Run::share_out() {
  const os::TimePoint begin = os::now();
  const int degree = scaling_->experts, before = expert_degree();
  checkpoints_->settle();
  const nlohmann::json strategy =
      strategy_json(state_->sharded.options().strategy, state_->setting().tiers, setup_.choice);
  const at::Tensor window = window_for_experts(degree);
  const Checkpointing::Wishes due{.save = wishes_.save};
  if (window.defined()) {
    hand_over(degree, strategy, window);
    wishes_ = due;
  } else if (!go_through_checkpoint(degree, strategy)) {
    return false;
  } else {
    pending_ = false;
    save_begun_ = 0;
  }
  scheduled_until_ = state_->step;
  const double seconds = os::seconds_since(begin);
  const nlohmann::json change = {{"step", state_->step}, {"from", before}, {"to", degree}, {"seconds", seconds}};
  sharings_.push_back(change);
  const auto asked = std::exchange(scaling_, std::nullopt);
  remember(strategy_key, strategy.dump());
  if (leads()) {
    const std::string text = cat("experts are shared out over ", degree, " ranks, before over ", before);
    output_->say(cat("step ", state_->step, ": ", text, ", in ", seconds, " s"));
    tell("dial", text);
    if (dial_server_ && asked) {
      dial::Json event = {{"event", "shared_out"}, {"degrees", strategy.at("degrees")}};
      event.update(dial::Json::parse(change.dump()));
      dial_server_->tell(asked->client, event);
    }
  }
  make_dial();
  return !window.defined();
}

void Run::hand_over(int degree, const nlohmann::json& strategy, const at::Tensor& window) {
  if (leads()) output_->clear_line();
  known_.erase(degree_key);  // who has not heard of the new one asks those who have
  dial_server_ = dial_->hand_over();
  end_services("experts are shared out over other ranks");
  loads_.reset();
  memory_limit_.reset();
  state_->sharded.zero_grad();
  before_change_ = Before{.experts = expert_degree(), .state = std::move(state_)};
  set_experts(degree);
  take_strategy(strategy);
  make_state(TrainingState::Values::zeros);
  state_->take_over(*before_change_->state, window);
  counted_ = state_->optimizer->steps_done();
  comm::lowest_rank_with(*fabric_, false);
  checkpoint::crash_point("handed-over", fabric_->rank());
  if (leads()) membership_.remember(degree_key, cat(degree));
  checkpoint::crash_point("degree-left", fabric_->rank());
  comm::lowest_rank_with(*fabric_, false);
  known_[degree_key] = cat(degree);
  before_change_.reset();
  make_services();
  if (checkpoints_->memory() != nullptr) checkpoints_->memory()->keep_newest();
  checkpoints_->begin(last_save_);
}

/// False: it could not be saved.
bool Run::go_through_checkpoint(int degree, const nlohmann::json& strategy) {
  if (!keep_for_change()) return false;
  known_.erase(degree_key);
  std::string kept;
  if (leads()) {
    kept = last_kept();
    membership_.remember(degree_key, cat(degree));
    output_->clear_line();
  }
  kept = comm::text_of(*fabric_, kept, 0);
  known_[degree_key] = cat(degree);
  dial_server_ = dial_->hand_over();
  end_services("experts are shared out over other ranks");
  give_up_state();
  set_experts(degree);
  take_strategy(strategy);
  make_state(TrainingState::Values::zeros);
  make_services();
  restore(*state_, {.mode = Resume::Mode::path, .path = kept}, *folders_, checkpoints_->memory());
  checkpoints_->begin(last_save_);
  whole_ = true;
  return true;
}

/// What is made from here on is of so many ranks that share out experts.
void Run::set_experts(int degree) {
  setup_.mesh = mesh_with_experts(setup_.mesh, degree);
  written_ = with_experts(written_, degree);
  config_ = with_experts(config_, degree);
}

/// While the ranks meet after a loss: those that are left may not have come to 4, and new ones know what was written
/// before the run began. Collective.
void Run::hear_of_experts() {
  const std::string text = remembered(degree_key);
  if (before_change_) choose_mesh(text.empty() ? before_change_->experts : std::stoi(text));
  if (text.empty() || std::stoi(text) == expert_degree()) return;
  give_up_state();
  set_experts(std::stoi(text));
}

/// A rank was lost in 2 to 4, and this one has both states.
void Run::choose_mesh(int degree) {
  Before before = std::move(*std::exchange(before_change_, std::nullopt));
  if (degree == before.experts) {
    loads_.reset();
    state_ = std::move(before.state);
    set_experts(before.experts);
    loads_.emplace(*state_->model);
    limit_memory();
  }
  counted_ = state_->optimizer->steps_done();
}

}  // namespace tesserae::train
