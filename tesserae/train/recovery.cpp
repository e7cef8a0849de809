// What a rank does after another one was lost, and what a new process in its place does:
//
//  1. The ranks meet in the next epoch. A rank that is left has given up what was broken.
//  2. It ends its broken step. If the norm had come, the step has counted: in the update no rank waits for another, so
//     it was carried through. Who saves, and who turns the dial, ends: another one begins in 8.
//  3. All tell who has a whole state, and of which step. Some may be one step behind: those whom the norm has not
//     reached. They have the gradients, since the norm needs everybody's.
//  4. The lowest rank with the latest step tells what others lack: the norm and the sums of that step, its description,
//     its degrees and tiers, where the run writes.
//  5. Those behind carry out the update, too. Now all that is left is of one step.
//  6. Those that are left make their groups again, while new ones build their models; new ones get their part from a
//     replica that has the same.
//  7. If some part has no replica left, or nobody has a state: all go back to the newest snapshot in memory, or
//     checkpoint, or to the beginning if there is none yet. Without checkpoints the job ends, unless no step was done.
//     A run that had not begun (not all had a state yet) begins, in its folder if any rank that is left knows it.
//  8. The run goes on: what the last step still lacks (evaluation, its line, its checkpoint) is done, by all.
//
// Another loss at any point begins at 1 again. A state counts as whole from the end of 6 or 7 on, and for a rank that
// is left at any time but in a turn of the dial.

#include "tesserae/train/recovery.h"

#include <algorithm>
#include <bit>
#include <span>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/comm/agree.h"
#include "tesserae/comm/rank_list.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/same_config.h"

namespace tesserae::train {
namespace {

// JSON has no numbers that are not finite, and a norm may be one.
nlohmann::json bits_of(std::span<const double> values) {
  nlohmann::json bits = nlohmann::json::array();
  for (const double value : values) bits.push_back(std::bit_cast<int64_t>(value));
  return bits;
}

std::vector<double> from_bits(const nlohmann::json& bits) {
  std::vector<double> values;
  for (const auto& value : bits) values.push_back(std::bit_cast<double>(value.get<int64_t>()));
  return values;
}

// Which run has written the checkpoint; empty: it does not say, or cannot be read.
std::string run_of(const os::Path& path) {
  try {
    const checkpoint::Checkpoint opened = checkpoint::Checkpoint::open(path);
    const nlohmann::json& training = opened.manifest().training;  // another program's may be anything
    const auto run = training.find("run");
    return run != training.end() && run->is_string() ? run->get<std::string>() : "";
  } catch (const Error& unreadable) {
    log(LogLevel::warning, cat(path.native(), " is passed over: ", unreadable.what()));
    return {};
  }
}

}  // namespace

nlohmann::json strategy_json(const mesh::Strategy& strategy, const offload::Tiers& tiers, const std::string& choice) {
  return {{"degrees", dial::to_json(strategy.degrees)},
          {"free_after_forward", strategy.free_after_forward},
          {"free_after_backward", strategy.free_after_backward},
          {"offload", dial::to_json(tiers)},
          {"choice", choice}};
}

mesh::Strategy strategy_from(const nlohmann::json& told, mesh::Strategy strategy) {
  strategy.degrees = dial::degrees_from(told.at("degrees"));
  strategy.free_after_forward = told.at("free_after_forward");
  strategy.free_after_backward = told.at("free_after_backward");
  return strategy;
}

void Run::connect() {
  comm::FabricOptions options;
  options.backend = config_.run.backend;
  options.device = setup_.device;
  options.connect_deadline = os::milliseconds(config_.run.connect_deadline_seconds);
  options.deadline = os::milliseconds(config_.run.deadline_seconds);
  options.epoch = membership_.epoch();
  if (membership_.served()) options.cancelled = [this] { return membership_.is_over(); };
  fabric_ = comm::Fabric::connect(world_, options);
}

void Run::meet() {
  if (membership_.is_of_those_left()) return go_on_with_fewer();
  const os::TimePoint begin = os::now();
  const int epoch = membership_.epoch();
  if (membership_.ranks() != setup_.mesh.ranks()) change_size();
  // 1.
  fabric_ == nullptr ? connect() : fabric_->reconnect(epoch);
  listen();
  if (epoch == 0) {
    // Our launcher says the same to all ranks of its host.
    if (world_.launch().local_size < world_.launch().size) require_same_config(*fabric_, config_, setup_);
    return start(resume_);
  }
  end_broken_step();  // 2
  hear_of_experts();
  const Standing all = agree_on_standing();  // 3
  if (!all.run.empty()) folders_ = join_folders(*fabric_, config_, resume_, all.run, folders_);
  if (!all.begun) {
    start(resume_);
    return fabric_->forget_broken();
  }
  if (config_.sharding.automatic) links_ = cost::measure_links(*fabric_);
  if (const nlohmann::json told = scaling_at_hand(); !told.is_null()) {
    take_up(told, all, begin);
    serve_page();
    return fabric_->forget_broken();
  }
  forget_scaling("the launcher could not start others, its log says why");
  const std::string from = go_on(all);
  serve_page();
  fabric_->forget_broken();
  const double seconds = os::seconds_since(begin);
  recoveries_.push_back(
      {{"epoch", epoch}, {"ranks", all.new_ones}, {"step", state_->step}, {"from", from}, {"seconds", seconds}});
  if (!output_) return;
  const int64_t lost = std::max<int64_t>(all.step - state_->step, 0);
  const std::string who = all.new_ones.empty() ? "the ranks met again"
                                               : cat("a new process has the place of ", comm::rank_list(all.new_ones));
  output_->say(
      cat(who, ": on from step ", state_->step, lost > 0 ? cat(", ", lost, " steps back") : "", ", ", seconds, " s"));
}

std::vector<int> Run::missing(const comm::CommError& failure) const {
  const auto* const timeout = dynamic_cast<const comm::Timeout*>(&failure);
  if (timeout == nullptr) return {};
  if (fabric_ == nullptr) return timeout->missing();  // while the ranks met they knew no other numbers
  std::vector<int> ranks;
  for (const int rank : timeout->missing()) ranks.push_back(fabric_->world().launcher_rank(rank));
  return ranks;
}

// 2.

/// These have threads that read the state.
void Run::end_services(const std::string& why) {
  dial_.reset();
  if (monitor_) monitor_->end(why);
  if (checkpoints_) {
    save_begun_ = std::max(save_begun_, checkpoints_->save_begun());  // of a loss before this one, too
    last_save_ = checkpoints_->last_save();
  }
  checkpoints_.reset();
  wishes_ = {};
  turn_to_.reset();
}

void Run::end_broken_step() {
  end_services("a rank was lost");
  if (before_change_ || !state_) return;  // hear_of_experts() finds out which of two states counts
  if (!whole_ || !state_->sharded.whole()) {
    give_up_state();
  } else if (state_->optimizer->steps_done() != counted_) {
    count_step();
  }
}

void Run::give_up_state() {
  whole_ = false;
  loads_.reset();
  memory_limit_.reset();
  state_.reset();
}

// 3.

Run::Standing Run::agree_on_standing() {
  enum Word : size_t { has, step, origin, pending, stopped, save, parameters, gradients, optimizer, tiers, words };
  const auto ranks = static_cast<size_t>(fabric_->size());
  std::vector<int64_t> table(ranks * words, 0);
  int64_t* const own = table.data() + static_cast<size_t>(fabric_->rank()) * words;
  own[stopped] = stopped_by_;
  own[save] = save_begun_;
  if (whole_) {
    const auto& [degrees, on] = state_->setting();
    own[has] = 1;
    own[step] = state_->step;
    own[origin] = origin_ ? origin_->step : 0;
    own[pending] = pending_ ? 1 : 0;
    own[parameters] = degrees.parameters;
    own[gradients] = degrees.gradients;
    own[optimizer] = degrees.optimizer;
    for (const offload::Tier tier : {on.parameters, on.gradients, on.optimizer}) {
      own[tiers] = 10 * own[tiers] + static_cast<int64_t>(tier);
    }
  }
  table = comm::counts_over_ranks(*fabric_, table);
  const auto of = [&](size_t rank, Word word) { return table[rank * words + word]; };
  Standing all;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (of(rank, has) == 0 || (all.reference >= 0 && of(rank, step) <= all.step)) continue;
    all.reference = static_cast<int>(rank);
    all.step = of(rank, step);
    all.origin = of(rank, origin);
  }
  const auto first = static_cast<size_t>(all.reference);
  for (size_t rank = 0; rank < ranks; ++rank) {
    // A change of degrees that others did not reach leaves them behind; nobody else is behind by more than a step.
    const bool same = all.reference >= 0 && of(rank, has) != 0 && of(rank, step) >= all.step - 1 &&
                      of(rank, parameters) == of(first, parameters) && of(rank, gradients) == of(first, gradients) &&
                      of(rank, optimizer) == of(first, optimizer) && of(rank, tiers) == of(first, tiers);
    all.whole.push_back(same);
    if (!same) all.new_ones.push_back(static_cast<int>(rank));
    all.pending = all.pending || (same && (of(rank, step) < all.step || of(rank, pending) != 0));
  }
  // What was agreed on by some counts for all. A rank that has written its part does not know of the commit.
  const int64_t saved = newest_saved();
  for (size_t rank = 0; rank < ranks; ++rank) {
    all.save_broken = all.save_broken || of(rank, save) > saved;
    if (stopped_by_ == 0) stopped_by_ = static_cast<int>(of(rank, stopped));
  }
  const int asked = comm::lowest_rank_with(*fabric_, !stop_reason_.empty());
  if (asked >= 0) stop_reason_ = comm::text_of(*fabric_, stop_reason_, asked);
  const int broken = comm::lowest_rank_with(*fabric_, !broken_off_.empty());
  if (broken >= 0) broken_off_ = comm::text_of(*fabric_, broken_off_, broken);
  all.pending = all.pending || all.save_broken || stopped_by_ != 0 || all.step == config_.train.steps;
  all.run = remembered(run_key);
  all.begun = !remembered(strategy_key).empty();
  return all;
}

// 4.

nlohmann::json Run::past() const {
  return {{"recoveries", recoveries_}, {"scalings", scalings_},   {"sharings", sharings_},
          {"bad_steps", bad_steps_},   {"differing", differing_}, {"agreed", agreed_}};
}

nlohmann::json Run::tell() const {
  nlohmann::json told = past();
  told["strategy"] = strategy_json(state_->sharded.options().strategy, state_->setting().tiers, setup_.choice);
  told["norm"] = bits_of(std::span(&state_->optimizer->last_step().norm, 1));
  told["sums"] = bits_of(sums_);
  told["record"] = to_line(record_);
  told["description"] = state_->description();
  told["step"] = state_->step;
  return told;
}

/// What the one who told knew of the run's past.
void Run::hear(const nlohmann::json& told) {
  recoveries_ = told.at("recoveries");
  scalings_ = told.at("scalings");
  sharings_ = told.at("sharings");
  bad_steps_ = told.at("bad_steps");
  differing_ = told.at("differing");
  agreed_ = told.at("agreed");
}

/// What every rank of this run is to know; for those that come later the launcher knows it, too. On all ranks.
void Run::remember(const std::string& what, const std::string& value) {
  known_[what] = value;
  if (leads()) membership_.remember(what, value);
}

/// Ranks that are left are asked first: a launcher that has just taken over may not have heard of it. Collective.
std::string Run::remembered(const std::string& what) {
  const auto own = known_.find(what);
  const int knows = comm::lowest_rank_with(*fabric_, own != known_.end());
  if (knows < 0) return comm::text_of(*fabric_, leads() ? membership_.remembered(what) : "", 0);
  const std::string text = comm::text_of(*fabric_, own != known_.end() ? own->second : "", knows);
  remember(what, text);
  return text;
}

void Run::take_strategy(const nlohmann::json& told) {
  setup_.strategy = strategy_from(told, setup_.strategy);
  setup_.tiers = dial::tiers_from(told.at("offload"));
  setup_.choice = told.at("choice");
}

nlohmann::json Run::hear_of_reference(const Standing& all) {
  const std::string text = fabric_->rank() == all.reference ? tell().dump() : "";
  nlohmann::json told = nlohmann::json::parse(comm::text_of(*fabric_, text, all.reference));
  hear(told);
  return told;
}

/// Returns from what.
std::string Run::go_on(const Standing& all) {
  if (all.reference < 0 || !take_over(all, hear_of_reference(all))) {
    require_saved(comm::rank_list(all.new_ones), all);
    return go_back(all);
  }
  make_services();
  if (checkpoints_->memory() != nullptr) checkpoints_->memory()->keep_newest();
  checkpoints_->begin(last_save_);
  whole_ = true;
  pending_ = all.pending;
  wishes_.save = all.save_broken ? 1 : 0;
  scheduled_until_ = state_->step;
  const std::string from = "the ranks that are left";
  if (!leads()) return from;
  begin_output(Origin{.step = state_->step, .from = from});
  return from;
}

/// Rank 0's. The rank 0 before it may have been lost between the end of a step and its line.
void Run::begin_output(const std::optional<Origin>& origin) {
  if (!output_) output_.emplace(config_, setup_, *folders_, origin);
  if (!pending_ && record_.step == state_->step && record_.step > output_->last_step()) output_->add(record_);
}

// 5, 6.

/// A rank with a state.
void Run::catch_up(const Standing& all, const nlohmann::json& told) {
  if (state_->step == all.step) return;
  sums_ = from_bits(told.at("sums"));
  state_->optimizer->finish_step(from_bits(told.at("norm")).front(), step_options());
  count_step();
}

bool Run::take_over(const Standing& all, const nlohmann::json& told) {
  if (all.whole[static_cast<size_t>(fabric_->rank())]) {
    catch_up(all, told);
    state_->rejoin();
  } else {
    whole_ = false;
    take_strategy(told.at("strategy"));
    make_state(TrainingState::Values::zeros);
    state_->take_over(told.at("description"), all.step);
    if (const auto record = from_line(told.at("record").get<std::string>())) record_ = *record;
    record_.degrees = setup_.strategy.degrees;
  }
  return state_->fill(all.whole, all.reference);
}

// 7.

void Run::require_saved(const std::string& lost, const Standing& all) {
  if (all.reference >= 0 && all.step == all.origin) return;  // the beginning is as good
  if (config_.checkpoint.enabled() || newest_saved() > 0) return;
  throw StateLost("train",
                  cat("of what ", lost, " held, no other rank has a copy, and nothing was saved: ", how_to_keep_it));
}

std::string Run::go_back(const Standing& all) {
  whole_ = false;
  const nlohmann::json begun = nlohmann::json::parse(remembered(strategy_key));
  if (!state_) {
    take_strategy(begun);
    make_state(TrainingState::Values::zeros);
  }
  make_services();
  origin_ = newest_of_this_run(all.step);
  if (!origin_) {
    checkpoints_.reset();
    take_strategy(begun);
    make_state(TrainingState::Values::initial);
    make_services();
    if (resume_.mode == Resume::Mode::path) origin_ = restore(*state_, resume_, *folders_, nullptr);
  }
  checkpoints_->begin(last_save_);
  whole_ = true;
  pending_ = false;
  save_begun_ = 0;
  agreed_ = std::min(agreed_, origin_ ? origin_->step : 0);
  // The bad step that ended the run is undone, if its own end is not what was saved.
  if (!origin_ || origin_->step < all.step) broken_off_.clear();
  scheduled_until_ = -1;
  output_.reset();
  if (leads()) output_.emplace(config_, setup_, *folders_, origin_);
  return origin_ ? origin_->from : "the beginning";
}

/// The step of this run's last checkpoint, on all ranks; 0: it has none.
int64_t Run::newest_saved() {
  int64_t saved = saved_;
  if (leads()) {
    const std::string text = membership_.remembered("saved");
    saved = std::max<int64_t>(saved, text.empty() ? 0 : std::stoll(text));
  }
  return comm::largest_over_ranks(*fabric_, {saved})[0];
}

/// A folder of checkpoints may hold those of other runs, which count only for one that was to continue them. This one
/// had finished step `reached`, if anybody is left who knows, and said so of its last checkpoint.
std::optional<Origin> Run::newest_of_this_run(int64_t reached) {
  if (resume_.mode == Resume::Mode::automatic) {
    return restore(*state_, resume_, *folders_, checkpoints_->memory());
  }
  const int64_t saved = newest_saved();
  if (checkpoints_->memory() != nullptr) {
    if (const auto found = checkpoints_->memory()->restore(saved)) {
      state_->take_over(found->description, found->step);
      state_->publish();
      return Origin{.step = found->step, .from = "memory of the hosts", .in_memory = true};
    }
  }
  // Those of more ranks become a checkpoint first.
  const auto survived =
      checkpoints_->memory() != nullptr ? checkpoints_->memory()->save_surviving(saved) : std::nullopt;
  const int64_t first = survived.value_or(saved), last = survived.value_or(std::max(saved, reached));
  if (first == 0) return std::nullopt;
  std::string path;
  if (leads()) {
    for (const checkpoint::Committed& committed : checkpoint::list_checkpoints(folders_->checkpoints)) {
      if (committed.step < first || committed.step > last) continue;
      if (run_of(committed.path) == folders_->run_identity) path = committed.path.native();
    }
  }
  path = comm::text_of(*fabric_, path, 0);
  if (path.empty()) return std::nullopt;
  return restore(*state_, {.mode = Resume::Mode::path, .path = path}, *folders_, checkpoints_->memory());
}

}  // namespace tesserae::train
