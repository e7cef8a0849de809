#include "tesserae/train/run.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <span>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/checkpoint/weights.h"
#include "tesserae/comm/agree.h"
#include "tesserae/model/generate.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/seconds.h"
#include "tesserae/preemption/agree.h"
#include "tesserae/train/job_size.h"
#include "tesserae/train/progress.h"
#include "tesserae/train/sample.h"

// A step:
//  1. `accumulate` forwards and backwards; all but the last inside no_sync;
//  2. the optimizer's step, once nobody copies what it writes: norm, clipping, update at the schedule's rate. From the
//     moment when the norm is known the step counts, whatever happens to other ranks (recovery.cpp): what is said of it
//     (the loss, the loads of experts) is summed with the norm;
//  3. one all-reduce in which the ranks agree on whether anyone was asked to stop, and on what is to be saved;
//  4. a step whose numbers are bad was not updated with: it is left out, or the run goes back, or ends (rollback.cpp);
//  5. at the steps that want it: replicas are compared; evaluation;
//  6. rank 0 writes the record;
//  7. at the steps that want it: degrees and tiers change (dial/dial.h; that was agreed on in 3);
//  8. at the steps that want it: a checkpoint; or the state is kept for another number of ranks (scaling.cpp), or for
//     experts on others (sharing_out.cpp).
namespace tesserae::train {

Run::Run(const config::Config& config, JobSetup setup, Resume resume, const mesh::World& world,
         comm::Membership& membership)
    : launched_(config),
      written_for_(configured_ranks(world.size())),
      written_(config),
      config_(for_ranks(config, written_for_, world.size())),
      setup_(std::move(setup)),
      world_(world),
      resume_(std::move(resume)),
      membership_(membership),
      schedule_{.peak = config.optimizer.lr,
                .warmup_steps = config.optimizer.warmup_steps,
                .total_steps = config.train.steps,
                .min_ratio = config.optimizer.min_lr_ratio,
                .decay = optim::decay_from_name(config.optimizer.schedule)} {}

std::optional<int> Run::train() {
  if (!state_) return std::nullopt;
  if (!began_) began_ = os::now();
  make_dial();
  for (;;) {
    if (pending_) finish_step();
    if (!state_) return std::nullopt;
    if (state_->step >= config_.train.steps || stopped_by_ != 0 || !broken_off_.empty()) break;
    train_step();
  }
  finish(os::seconds_since(*began_));
  if (config_.run.weights_folder && state_->step == config_.train.steps) write_weights(*config_.run.weights_folder);
  if (!broken_off_.empty()) {
    if (monitor_) monitor_->end("stopped for its bad numbers");
    throw optim::BadNumbers("train", cat(broken_off_, "; ", end_of_bad_run()));
  }
  checkpoints_->finish();
  if (monitor_) monitor_->end(stopped_by_ == 0 ? "done" : cat("stopped, asked by ", stop_reason_));
  if (stopped_by_ == 0) return 0;
  if (!checkpoints_->saved()) return 128 + stopped_by_;
  const bool complete = state_->step == config_.train.steps;  // it was asked in the last step
  return complete ? 0 : config_.preemption.exit_code;
}

optim::StepOptions Run::step_options() {
  overflow_expected_ = state_->scaler && !state_->scaler->at_minimum();  // before the step lowers the scale
  return {.lr = schedule_.at(state_->step),
          .clip_norm = config_.train.clip_norm,
          .scaler = state_->scaler ? &*state_->scaler : nullptr,
          .keep_gradients = false,
          .also_sum = &sums_,
          .accept = [this](double norm) { return verdict(norm).empty(); }};
}

/// Once `sums_` are those of all ranks.
std::string Run::verdict(double norm) const {
  return state_->bad_steps.verdict(sums_[0] / state_->fabric->size(), norm, overflow_expected_);
}

/// Steps 1 to 3.
void Run::train_step() {
  step_began_ = os::now();
  before_ = state_->sharded.statistics();
  if (state_->disk != nullptr) disk_before_ = state_->disk->counters();
  wishes_ = {};
  turn_to_.reset();
  state_->seed_random();
  state_->model->train();
  state_->sharded.zero_grad();
  loads_->begin_step();
  const int64_t micro_batches = config_.train.accumulate;
  optim::LossScaler* const scaler = state_->scaler ? &*state_->scaler : nullptr;
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions(fabric_->device()).dtype(at::kFloat));
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    std::optional<shard::NoSync> no_sync;
    if (micro + 1 < micro_batches) no_sync.emplace(state_->sharded.engine());
    if (monitor_) monitor_->timer().enter(monitor::Stage::data);
    const data::Batch batch = state_->loader.training_batch(state_->position, micro);
    if (monitor_) monitor_->timer().enter(monitor::Stage::forward);
    at::Tensor loss = loss_of(batch);
    loss_sum += loss.detach();
    loss = loss / static_cast<double>(micro_batches);
    (scaler != nullptr ? scaler->scale(loss) : loss).backward();
  }
  sums_ = loads_->to_sum();
  own_loss_ = loss_sum.item<double>() / static_cast<double>(micro_batches);
  sums_.insert(sums_.begin(), own_loss_);
  checkpoints_->before_update();
  if (monitor_) monitor_->timer().enter(monitor::Stage::optimizer);
  state_->optimizer->step(step_options());
  if (monitor_) monitor_->timer().enter(monitor::Stage::between);
  count_step();
  agree();
}

/// The optimizer's step has passed the norm on this rank, and `sums_` are those of all ranks.
void Run::count_step() {
  counted_ = state_->optimizer->steps_done();
  record_ = StepRecord();
  record_.lr = schedule_.at(state_->step);
  record_.grad_norm = state_->optimizer->last_step().norm;
  record_.skipped = state_->optimizer->last_step().skipped;
  record_.degrees = state_->layout().degrees();
  record_.ranks = state_->fabric->size();  // not fabric_: others may be lost by now, and not replaced
  record_.loss = sums_[0] / record_.ranks;
  record_.bad = verdict(record_.grad_norm);
  record_.rolled_back_from = std::exchange(rolled_back_from_, 0);
  state_->bad_steps.add(record_.loss, !record_.bad.empty());
  const bool updated = !record_.skipped && record_.bad.empty();
  record_.experts = figures_of(loads_->from_sums(std::span(sums_).subspan(1), updated));
  if (record_.experts) record_.experts->degree = expert_degree();
  state_->position = state_->loader.after(1, state_->position);
  record_.step = ++state_->step;
  time_step();
  pending_ = true;
}

void Run::time_step() {
  const double seconds = os::seconds_since(step_began_);
  record_.step_ms = seconds * 1e3;
  record_.tokens_per_second = static_cast<double>(setup_.tokens_per_step) / seconds;
}

/// Step 3. Every rank must end after the same step, or the others would wait for it: so a request that reached one rank
/// is told to all.
void Run::agree() {
  const os::TimePoint begin = os::now();
  const Checkpointing::Wishes own = checkpoints_->wishes();
  const std::optional<preemption::Notice> notice = stop_->notice();
  std::vector<double> row = {notice ? 1.0 : 0.0, own.save, own.failed};
  if (state_->disk != nullptr) {
    const offload::DiskCounters disk = state_->disk->counters();
    row.push_back(static_cast<double>(disk.read - disk_before_.read));
    row.push_back(static_cast<double>(disk.written - disk_before_.written));
  }
  const size_t words = row.size();
  const std::vector<double> dialed = dial_->to_sum(state_->step, os::seconds_since(step_began_));
  row.insert(row.end(), dialed.begin(), dialed.end());
  const std::vector<double> sums = comm::sums_over_ranks(*fabric_, row);
  if (sums[0] > 0) {
    const preemption::Notice first = preemption::agree(notice, *fabric_).value();
    stopped_by_ = first.signal;
    stop_reason_ = first.reason;
  }
  wishes_ = {.save = sums[1], .failed = sums[2]};
  turn_to_ = dial_->from_sums(state_->step, std::span(sums).subspan(words));
  if (dial_->scaling()) scaling_ = dial_->scaling();
  record_.memory_bytes = dial_->seen().memory;
  if (state_->disk != nullptr) {
    record_.disk = {
        .read = sums[3], .written = sums[4], .waited = state_->disk->counters().waited - disk_before_.waited};
  }
  if (memory_limit_) {
    const bool on_host = fabric_->device().is_cpu();
    const double used = on_host ? dial_->here().used : static_cast<double>(os::recent_memory().peak);
    if (memory_limit_->after_step(static_cast<int64_t>(used)) && leads()) warn_of_memory(used);
  }
  const shard::Statistics after = state_->sharded.statistics();
  if (monitor_) monitor_->timer().end_step(state_->step);
  time_step();
  record_.state_bytes = static_cast<double>(after.state_bytes);
  record_.comm_ms = 1e3 * (os::seconds_since(begin) + after.exposed_gather - before_.exposed_gather +
                           after.exposed_reduce - before_.exposed_reduce);
}

/// Steps 4 to 8; also of a step that others had finished when a rank was lost: what is written already is not written
/// again.
void Run::finish_step() {
  if (!record_.bad.empty() && !leaves_out_bad_step()) return;
  const bool last = state_->step == config_.train.steps || stopped_by_ != 0 || !broken_off_.empty();
  const bool due = config_.train.eval_every > 0 && state_->step % config_.train.eval_every == 0;
  check_replicas();
  // A run that was asked to stop does not start something long.
  if ((last || due) && stopped_by_ == 0 && broken_off_.empty()) record_.val_loss = evaluate();
  checkpoint::crash_point("before-line", fabric_->rank());
  if (output_ && record_.step > output_->last_step()) output_->add(record_);
  warn_of(record_);
  compare_with_forecast();
  if (turn_to_ && !last) turn_dial(*turn_to_);
  turn_to_.reset();
  if (scaling_ && !last && (scaling_->experts > 0 ? share_out() : leave_for_scaling())) return;
  checkpoints_->after_step(wishes_, last);
  save_begun_ = 0;  // what was broken has begun again
  pending_ = false;
}

/// Step 7.
void Run::turn_dial(const shard::Setting& to) {
  const offload::Tiers before = state_->setting().tiers;
  if (to.tiers.uses(offload::Tier::disk) && config_.checkpoint.memory_every_steps > 0) {
    return dial_->refused("checkpoint.memory_every_steps keeps the whole state in memory");
  }
  checkpoints_->before_update();  // nobody copies what is about to move
  try {
    const shard::Resharding change = state_->turn(to);
    if (to.tiers != before) limit_memory();
    dial_->changed(change);
  } catch (const OutOfMemory& error) {
    return dial_->refused(error.what());  // nothing has moved; if anything had, the next step would say so
  } catch (const InvalidArgument& error) {
    return dial_->refused(error.what());
  }
  if (monitor_) monitor_->set_job("degrees", dial::to_json(to.degrees));
  if (monitor_) monitor_->set_job("offload", dial::to_json(to.tiers));
  tell("dial", cat("the dial is at ", to_string(to), " now"));
  if (to.tiers != before && output_ && state_->disk != nullptr) output_->say(describe_offload());
  checkpoints_->layout_changed();
  misses_seen_ = state_->sharded.statistics().pool_misses;  // the pool is another one
}

at::Tensor Run::loss_of(const data::Batch& batch) {
  return state_->model->forward(batch.tokens.to(fabric_->device()), batch.targets.to(fabric_->device()));
}

/// The mean loss over the first eval_batches * batch_per_rank * ranks held-out samples; nothing if none are held out.
std::optional<double> Run::evaluate() {
  const int64_t batches = config_.train.eval_batches;
  if (batches == 0 || setup_.validation_samples == 0) return std::nullopt;
  if (output_) output_->clear_line();
  const at::NoGradGuard no_grad;
  state_->model->eval();
  double sum = 0;
  for (int64_t i = 0; i < batches; ++i) {
    sum += loss_of(state_->loader.validation_batch(i)).item<double>();
  }
  return state_->sharded.sum_over_ranks(sum) / static_cast<double>(batches * state_->mesh->degree(mesh::axes::loss));
}

void Run::warn_of(const StepRecord& record) {
  const int64_t misses = state_->sharded.statistics().pool_misses;
  if (config_.sharding.warn_of_pool_misses && misses > misses_seen_) {
    log(LogLevel::warning, cat("step ", record.step, ": the pool had no buffer for ", misses - misses_seen_,
                               " requests, which were allocated"));
  }
  misses_seen_ = misses;
}

/// What every rank must take part in comes first, in the same order; then rank 0 writes.
void Run::finish(double seconds) {
  RunFacts facts;
  facts.peak_memory = from_all_ranks(os::peak_resident());
  for (const uint64_t bytes : from_all_ranks(os::process_memory().proportional)) facts.memory_sum += bytes;
  std::string sample;
  if (config_.train.sample_tokens > 0 && stopped_by_ == 0 && broken_off_.empty()) sample = make_sample();
  if (!output_) return;
  facts.layout = state_->layout();
  facts.mesh = state_->mesh->mesh();
  facts.hosts = fabric_->world().hosts();
  facts.parameters = setup_.parameters;
  facts.tokens_per_step = setup_.tokens_per_step;
  facts.device = c10::DeviceTypeName(fabric_->device().type(), true);
  facts.precision = dtype_name(setup_.precision.parameters.value_or(at::kFloat));
  facts.seconds = seconds;
  facts.bytes_sent = fabric_->counters().bytes();
  facts.engine = state_->sharded.statistics();
  facts.stopped_by = stopped_by_;
  facts.stop_reason = stop_reason_;
  facts.origin = origin_;
  facts.broken_off = broken_off_;
  facts.recoveries = recoveries_;
  facts.scalings = scalings_;
  facts.sharings = sharings_;
  facts.bad_steps = bad_steps_;
  facts.differing_replicas = differing_;
  facts.dial = dial_->figures();
  if (state_->activations) facts.activations = state_->activations->counters();
  if (config_.checkpoint.enabled()) facts.checkpoints = checkpoints_->figures();
  output_->finish(facts, sample);
}

void Run::write_weights(const std::string& folder) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& item : state_->model->named_buffers()) buffers.emplace_back(item.key(), item.value());
  checkpoint::export_weights(state_->sharded, folder, {}, buffers);
  if (output_) output_->say(cat("weights: in ", folder));
}

std::string Run::make_sample() {
  const at::NoGradGuard no_grad;
  state_->model->eval();
  std::vector<int64_t> prompt;
  for (const char byte : config_.train.sample_prompt) prompt.push_back(static_cast<unsigned char>(byte));
  const auto logits = [&](const at::Tensor& tokens) {
    return state_->model->forward(tokens.to(fabric_->device())).cpu();
  };
  const std::vector<int64_t> tokens = model::generate(
      logits, prompt,
      {.tokens = config_.train.sample_tokens, .window = config_.data.sequence_length, .seed = config_.run.seed});
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  return printable(prompt);
}

std::vector<uint64_t> Run::from_all_ranks(uint64_t value) {
  const auto values = comm::from_all_ranks(*fabric_, static_cast<double>(value));
  return {values.begin(), values.end()};
}

}  // namespace tesserae::train
