// How a run shares its experts out over another number of ranks while it trains (`tesserae dial --expert`). Ranks keep
// their processes and connections:
//
//  1. Rank 0's dial is asked, and refuses a degree that cannot be or for which there is no room. All ranks hear of
//     another one in the sums of a step.
//  2. That step is finished, and saved as a checkpoint. Where that fails, the run goes on as it was.
//  3. Rank 0 leaves the degree in the launcher's store, for those who come in the place of lost ranks. All agree that
//     it has.
//  4. Every rank gives up its state: with the mesh, what each of them holds of every expert is another. It makes the
//     state anew, and fills it from the checkpoint, as a job that begins with this degree would.
//
// A rank that is lost before 3 is a loss as any other, and the degree stays. From then on whoever meets finds the
// degree in the store, and goes on from the checkpoint (Run::hear_of_experts, and step 7 of recovery.cpp).

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/comm/agree.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/job_size.h"
#include "tesserae/train/run.h"

namespace tesserae::train {
namespace {

// In the launcher's store.
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

/// At the end of a step. False: that cannot be, and the run goes on as it was.
bool Run::share_out() {
  const os::TimePoint begin = os::now();
  const int degree = scaling_->experts, before = expert_degree();
  if (!keep_for_change()) return false;
  std::string kept;
  if (leads()) {
    kept = checkpoint::list_checkpoints(folders_->checkpoints).back().path.native();
    membership_.remember(degree_key, cat(degree));
    output_->clear_line();
  }
  kept = comm::text_of(*fabric_, kept, 0);
  const mesh::Strategy strategy = state_->sharded.options().strategy;
  const shard::Setting now = state_->setting();
  const nlohmann::json told = strategy_json(strategy, now.tiers, setup_.choice);
  dial_server_ = dial_->hand_over();
  end_services("experts are shared out over other ranks");
  give_up_state();
  set_experts(degree);
  take_strategy(told);
  make_state(TrainingState::Values::zeros);
  make_services();
  restore(*state_, {.mode = Resume::Mode::path, .path = kept}, *folders_, checkpoints_->memory());
  checkpoints_->begin(last_save_);
  whole_ = true;
  pending_ = save_broken_ = false;
  scheduled_until_ = state_->step;
  const double seconds = os::seconds_since(begin);
  const nlohmann::json change = {{"step", state_->step}, {"from", before}, {"to", degree}, {"seconds", seconds}};
  sharings_.push_back(change);
  const auto asked = std::exchange(scaling_, std::nullopt);
  if (leads()) {
    membership_.remember("strategy", told.dump());
    const std::string text = cat("experts are shared out over ", degree, " ranks, before over ", before);
    output_->say(cat("step ", state_->step, ": ", text, ", in ", seconds, " s"));
    tell("dial", text);
    if (dial_server_ && asked) {
      dial::Json event = {{"event", "shared_out"}, {"degrees", dial::to_json(now.degrees)}};
      event.update(dial::Json::parse(change.dump()));
      dial_server_->tell(asked->client, event);
    }
  }
  make_dial();
  return true;
}

/// Where there is no state: what is made from here on is of so many ranks that share out experts.
void Run::set_experts(int degree) {
  setup_.mesh = mesh_with_experts(setup_.mesh, degree);
  written_ = with_experts(written_, degree);
  config_ = with_experts(config_, degree);
}

/// While the ranks meet after a loss: those that are left may not have come to 4, and new ones know what was written
/// before the run began. Collective.
void Run::hear_of_experts() {
  const std::string text = remembered(degree_key);
  if (text.empty() || std::stoi(text) == expert_degree()) return;
  give_up_state();
  set_experts(std::stoi(text));
}

}  // namespace tesserae::train
