#include "tesserae/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/agree.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/experts/step_loads.h"
#include "tesserae/model/generate.h"
#include "tesserae/optim/schedule.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/signal_numbers.h"
#include "tesserae/train/checkpointing.h"
#include "tesserae/train/dial_setup.h"
#include "tesserae/train/restore.h"
#include "tesserae/train/run_output.h"
#include "tesserae/train/sample.h"
#include "tesserae/train/stop_request.h"
#include "tesserae/train/training_state.h"

namespace tesserae::train {
namespace {

double seconds_since(os::TimePoint begin) {
  return std::chrono::duration<double>(os::now() - begin).count();
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

/// One rank of a training run. A step:
///  1. `accumulate` forwards and backwards; all but the last inside no_sync;
///  2. the optimizer's step, with clipping and the schedule's rate, once nobody copies what it writes;
///  3. one all-reduce in which the ranks agree on the mean loss, on whether anyone was asked to stop, and on what is to
///     be saved;
///  4. at the steps that want it: evaluation;
///  5. rank 0 writes the record;
///  6. at the steps that want it: the degrees change (dial/dial.h; that was agreed on in 3);
///  7. at the steps that want it: a checkpoint.
class Run {
 public:
  Run(const config::Config& config, const JobSetup& setup, std::shared_ptr<comm::Fabric> fabric, const Resume& resume,
      std::optional<cost::Links> links)
      : config_(config),
        setup_(setup),
        fabric_(std::move(fabric)),
        state_(config, setup, fabric_),
        schedule_{.peak = config.optimizer.lr,
                  .warmup_steps = config.optimizer.warmup_steps,
                  .total_steps = config.train.steps,
                  .min_ratio = config.optimizer.min_lr_ratio,
                  .decay = optim::decay_from_name(config.optimizer.schedule)},
        folders_(choose_folders(*fabric_, config, resume)),
        checkpoints_(config, state_, folders_,
                     {.before_save =
                          [this] {
                            if (output_) output_->sync();
                          },
                      .say =
                          [this](const std::string& line) {
                            if (output_) output_->say(line);
                          }}) {
    origin_ = restore(state_, resume, folders_, checkpoints_.memory());
    checkpoints_.begin();
    if (fabric_->rank() == 0) output_.emplace(config, setup, folders_, origin_);
    dial_ = std::make_unique<dial::Dial>(
        fabric_, state_.layout().degrees(),
        dial_options(config, state_, folders_.run, links, [this](const std::string& line) { output_->say(line); }));
  }

  int run() {
    const os::TimePoint begin = os::now();
    while (state_.step < config_.train.steps && stopped_by_ == 0) {
      StepRecord record = train_step();
      const bool last = state_.step == config_.train.steps || stopped_by_ != 0;
      const bool due = config_.train.eval_every > 0 && state_.step % config_.train.eval_every == 0;
      // A run that was asked to stop does not start something long.
      if ((last || due) && stopped_by_ == 0) record.val_loss = evaluate();
      if (output_) output_->add(record);
      warn_of(record);
      if (turn_to_ && !last) turn_dial(*turn_to_);
      checkpoints_.after_step(wishes_, last);
    }
    finish(seconds_since(begin));
    checkpoints_.finish();
    return stopped_by_ == 0 || checkpoints_.saved() ? 0 : 128 + stopped_by_;
  }

 private:
  StepRecord train_step() {
    const os::TimePoint begin = os::now();
    const shard::Statistics before = state_.sharded.statistics();
    state_.model->train();
    state_.sharded.zero_grad();
    const int64_t micro_batches = config_.train.accumulate;
    optim::LossScaler* const scaler = state_.scaler ? &*state_.scaler : nullptr;
    at::Tensor loss_sum = at::zeros({}, at::TensorOptions(fabric_->device()).dtype(at::kFloat));
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      std::optional<shard::NoSync> no_sync;
      if (micro + 1 < micro_batches) no_sync.emplace(state_.sharded.engine());
      at::Tensor loss = loss_of(state_.loader.training_batch(state_.position, micro));
      loss_sum += loss.detach();
      loss = loss / static_cast<double>(micro_batches);
      (scaler != nullptr ? scaler->scale(loss) : loss).backward();
    }
    StepRecord record;
    record.step = state_.step + 1;
    record.lr = schedule_.at(state_.step);
    checkpoints_.before_update();
    const optim::StepResult result =
        state_.optimizer->step({.lr = record.lr, .clip_norm = config_.train.clip_norm, .scaler = scaler});
    record.grad_norm = result.norm;
    record.skipped = result.skipped;
    state_.position = state_.loader.after(1, state_.position);
    ++state_.step;
    record.degrees = state_.layout().degrees();
    const double loss = loss_sum.item<double>() / static_cast<double>(micro_batches);
    const double waited = agree(loss, seconds_since(begin), record);
    const double seconds = seconds_since(begin);
    const shard::Statistics after = state_.sharded.statistics();
    record.step_ms = seconds * 1e3;
    record.state_bytes = static_cast<double>(after.state_bytes);
    record.comm_ms =
        1e3 * (waited + after.exposed_gather - before.exposed_gather + after.exposed_reduce - before.exposed_reduce);
    record.tokens_per_second = static_cast<double>(setup_.tokens_per_step) / seconds;
    return record;
  }

  /// Step 6.
  void turn_dial(const mesh::Degrees& to) {
    checkpoints_.before_update();  // nobody copies what is about to move
    try {
      dial_->changed(state_.reshard(to));
    } catch (const OutOfMemory& error) {
      return dial_->refused(error.what());  // nothing has moved; if anything had, the next step would say so
    }
    checkpoints_.layout_changed();
    misses_seen_ = state_.sharded.statistics().pool_misses;  // the pool is another one
  }

  at::Tensor loss_of(const data::Batch& batch) {
    return state_.model->forward(batch.tokens.to(fabric_->device()), batch.targets.to(fabric_->device()));
  }

  /// Step 3. Every rank must end after the same step, or the others would wait for it: so a signal that reached one
  /// rank is told to all. Returns the seconds that it took.
  double agree(double loss, double step_seconds, StepRecord& record) {
    const os::TimePoint begin = os::now();
    const Checkpointing::Wishes own = checkpoints_.wishes();
    const int signal = stop_.signal();
    std::vector<double> row = {loss, static_cast<double>(signal), own.save, own.failed};
    const size_t words = row.size();
    const std::vector<double> loads = loads_.to_sum();
    row.insert(row.end(), loads.begin(), loads.end());
    const std::vector<double> dialed = dial_->to_sum(state_.step, step_seconds);
    row.insert(row.end(), dialed.begin(), dialed.end());
    const std::vector<double> sums = comm::sums_over_ranks(*fabric_, row);
    record.loss = sums[0] / fabric_->size();
    // Ranks may have had different signals; what counts is that there was one.
    if (sums[1] > 0) stopped_by_ = signal > 0 ? signal : os::signal_terminate;
    wishes_ = {.save = sums[2], .failed = sums[3]};
    record.experts = figures_of(loads_.from_sums(std::span(sums).subspan(words, loads.size())));
    turn_to_ = dial_->from_sums(state_.step, std::span(sums).subspan(words + loads.size()));
    record.memory_bytes = dial_->seen().memory;
    return seconds_since(begin);
  }

  /// The mean loss over the first eval_batches * batch_per_rank * ranks held-out samples; nothing if none are held out.
  std::optional<double> evaluate() {
    const int64_t batches = config_.train.eval_batches;
    if (batches == 0 || setup_.validation_samples == 0) return std::nullopt;
    if (output_) output_->clear_line();
    const at::NoGradGuard no_grad;
    state_.model->eval();
    double sum = 0;
    for (int64_t i = 0; i < batches; ++i) {
      sum += loss_of(state_.loader.validation_batch(i)).item<double>();
    }
    return state_.sharded.sum_over_ranks(sum) / static_cast<double>(batches * state_.mesh->degree(mesh::axes::loss));
  }

  void warn_of(const StepRecord& record) {
    // A loss scaler looks for the highest scale that does not overflow: with one, such steps are part of the setup.
    if (output_ && record.skipped && !state_.scaler) {
      log(LogLevel::warning, cat("step ", record.step, ": the gradients were not finite, nothing was updated"));
    }
    const int64_t misses = state_.sharded.statistics().pool_misses;
    if (config_.sharding.warn_of_pool_misses && misses > misses_seen_) {
      log(LogLevel::warning, cat("step ", record.step, ": the pool had no buffer for ", misses - misses_seen_,
                                 " requests, which were allocated"));
    }
    misses_seen_ = misses;
  }

  /// What every rank must take part in comes first, in the same order; then rank 0 writes.
  void finish(double seconds) {
    RunFacts facts;
    facts.peak_memory = from_all_ranks(os::peak_resident());
    for (const uint64_t bytes : from_all_ranks(os::process_memory().proportional)) facts.memory_sum += bytes;
    std::string sample;
    if (config_.train.sample_tokens > 0 && stopped_by_ == 0) sample = make_sample();
    if (!output_) return;
    facts.layout = state_.layout();
    facts.mesh = state_.mesh->mesh();
    facts.hosts = fabric_->world().hosts();
    facts.parameters = setup_.parameters;
    facts.tokens_per_step = setup_.tokens_per_step;
    facts.device = c10::DeviceTypeName(fabric_->device().type(), true);
    facts.precision = dtype_name(setup_.precision.parameters.value_or(at::kFloat));
    facts.seconds = seconds;
    facts.bytes_sent = fabric_->counters().bytes();
    facts.engine = state_.sharded.statistics();
    facts.stopped_by = stopped_by_;
    facts.origin = origin_;
    facts.dial = dial_->figures();
    if (config_.checkpoint.enabled()) facts.checkpoints = checkpoints_.figures();
    output_->finish(facts, sample);
  }

  std::string make_sample() {
    const at::NoGradGuard no_grad;
    state_.model->eval();
    std::vector<int64_t> prompt;
    for (const char byte : config_.train.sample_prompt) prompt.push_back(static_cast<unsigned char>(byte));
    const auto logits = [&](const at::Tensor& tokens) {
      return state_.model->forward(tokens.to(fabric_->device())).cpu();
    };
    const std::vector<int64_t> tokens = model::generate(
        logits, prompt,
        {.tokens = config_.train.sample_tokens, .window = config_.data.sequence_length, .seed = config_.run.seed});
    prompt.insert(prompt.end(), tokens.begin(), tokens.end());
    return printable(prompt);
  }

  std::vector<uint64_t> from_all_ranks(uint64_t value) {
    const auto values = comm::from_all_ranks(*fabric_, static_cast<double>(value));
    return {values.begin(), values.end()};
  }

  const config::Config& config_;
  const JobSetup& setup_;
  StopRequest stop_;
  std::shared_ptr<comm::Fabric> fabric_;
  TrainingState state_;
  experts::StepLoads loads_{*state_.model};
  optim::Schedule schedule_;
  RunFolders folders_;
  std::optional<RunOutput> output_;  // rank 0's
  Checkpointing checkpoints_;
  Checkpointing::Wishes wishes_;  // of the last step, of all ranks together
  std::optional<Origin> origin_;
  std::unique_ptr<dial::Dial> dial_;
  std::optional<mesh::Degrees> turn_to_;  // agreed on after the last step
  int stopped_by_ = 0;
  int64_t misses_seen_ = 0;
};

}  // namespace

int train(const config::Config& config, const JobSetup& setup, const mesh::World& world, const Resume& resume) {
  comm::FabricOptions options;
  options.backend = config.run.backend;
  options.device = setup.device;
  options.connect_deadline = milliseconds(config.run.connect_deadline_seconds);
  options.deadline = milliseconds(config.run.deadline_seconds);
  auto fabric = comm::Fabric::connect(world, options);
  JobSetup chosen = setup;
  std::optional<cost::Links> links;
  if (config.sharding.automatic) {
    links = cost::measure_links(*fabric);
    choose_degrees(chosen, config, fabric, *links);
  }
  return Run(config, chosen, std::move(fabric), resume, links).run();
}

}  // namespace tesserae::train
