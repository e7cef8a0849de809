#include "tesserae/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tesserae/base/log.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/model/generate.h"
#include "tesserae/model/gpt.h"
#include "tesserae/model/init.h"
#include "tesserae/optim/adamw.h"
#include "tesserae/optim/schedule.h"
#include "tesserae/optim/sgd.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/signal_numbers.h"
#include "tesserae/shard/sharded.h"
#include "tesserae/train/metrics.h"
#include "tesserae/train/progress.h"
#include "tesserae/train/run_folder.h"
#include "tesserae/train/sample.h"
#include "tesserae/train/stop_request.h"
#include "tesserae/train/summary.h"

namespace tesserae::train {
namespace {

double seconds_since(os::TimePoint begin) {
  return std::chrono::duration<double>(os::now() - begin).count();
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

model::Gpt make_model(const Config& config, const Plan& plan) {
  model::GptConfig shape = plan.model;
  shape.device = c10::kMeta;  // no rank ever holds the whole model: the engine fills it unit by unit
  model::Gpt model(shape);
  model->checkpoint_activations_of_blocks(config.checkpoint_activations);
  return model;
}

shard::Sharded shard(const model::Gpt& model, std::shared_ptr<comm::Fabric> fabric, const Config& config,
                     const Plan& plan) {
  return shard::shard_model(model, fabric,
                            {.strategy = plan.strategy,
                             .precision = plan.precision,
                             .accumulation = config.train.accumulation,
                             .limit_all_gathers = config.sharding.limit_all_gathers,
                             .limit_reductions = config.sharding.limit_reductions,
                             .initialize = model::initialize(model->config())});
}

std::unique_ptr<optim::Optimizer> make_optimizer(shard::Sharded& sharded, const Config::Optimizer& o) {
  if (o.name == "sgd") {
    return std::make_unique<optim::Sgd>(
        sharded, optim::SgdOptions{.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
  }
  return std::make_unique<optim::AdamW>(
      sharded, optim::AdamWOptions{
                   .lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.epsilon, .weight_decay = o.weight_decay});
}

/// One rank of a training run. A step:
///  1. `accumulate` forwards and backwards; all but the last inside no_sync;
///  2. the optimizer's step, with clipping and the schedule's rate;
///  3. one all-reduce in which the ranks agree on the mean loss and on whether anyone was asked to stop;
///  4. at the steps that want it: evaluation;
///  5. rank 0 writes the record.
class Run {
 public:
  Run(const Config& config, const Plan& plan, std::shared_ptr<comm::Fabric> fabric)
      : config_(config),
        plan_(plan),
        fabric_(std::move(fabric)),
        loader_(make_loader(config, plan, fabric_->rank())),
        model_(make_model(config, plan)),
        sharded_(shard(model_, fabric_, config, plan)),
        optimizer_(make_optimizer(sharded_, config.optimizer)),
        schedule_{.peak = config.optimizer.lr,
                  .warmup_steps = config.optimizer.warmup_steps,
                  .total_steps = config.train.steps,
                  .min_ratio = config.optimizer.min_lr_ratio,
                  .decay = optim::decay_from_name(config.optimizer.schedule)} {
    if (plan.precision.parameters == at::kHalf) scaler_.emplace();
    // Dropout differs between ranks, as their samples do.
    at::manual_seed(config.run.seed + static_cast<uint64_t>(fabric_->rank()));
  }

  int run() {
    if (leads()) begin_output();
    const os::TimePoint begin = os::now();
    int64_t step = 0;
    while (step < config_.train.steps && stopped_by_ == 0) {
      StepRecord record = train_step(step++);
      const bool last = step == config_.train.steps || stopped_by_ != 0;
      const bool due = config_.train.eval_every > 0 && step % config_.train.eval_every == 0;
      // A run that was asked to stop does not start something long.
      if ((last || due) && stopped_by_ == 0) record.val_loss = evaluate();
      if (leads()) {
        metrics_->add(record);
        progress_->step(record, os::peak_resident());
      }
      warn_of(record);
    }
    finish(seconds_since(begin));
    return stopped_by_ == 0 ? 0 : 128 + stopped_by_;
  }

 private:
  bool leads() const { return fabric_->rank() == 0; }

  void begin_output() {
    folder_ = make_run_folder(config_.run.folder);
    Json resolved = config_.resolved;
    resolved["model"]["vocabulary"] = plan_.model.vocabulary;
    os::files().write(folder_ + "/config.json", resolved.dump(2) + "\n");
    metrics_.emplace(folder_ + "/metrics.jsonl");
    progress_.emplace(config_.train.steps, config_.run.log_every);
    progress_->say(describe(plan_, config_));
    progress_->say(cat("run folder: ", folder_));
  }

  StepRecord train_step(int64_t step) {
    const os::TimePoint begin = os::now();
    const shard::Statistics before = sharded_.statistics();
    model_->train();
    sharded_.zero_grad();
    const int64_t micro_batches = config_.train.accumulate;
    const data::Position position = loader_.after(step);
    at::Tensor loss_sum = at::zeros({}, at::TensorOptions(fabric_->device()).dtype(at::kFloat));
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      std::optional<shard::NoSync> no_sync;
      if (micro + 1 < micro_batches) no_sync.emplace(sharded_.engine());
      at::Tensor loss = loss_of(loader_.training_batch(position, micro));
      loss_sum += loss.detach();
      loss = loss / static_cast<double>(micro_batches);
      (scaler_ ? scaler_->scale(loss) : loss).backward();
    }
    StepRecord record;
    record.step = step + 1;
    record.lr = schedule_.at(step);
    const optim::StepResult result = optimizer_->step(
        {.lr = record.lr, .clip_norm = config_.train.clip_norm, .scaler = scaler_ ? &*scaler_ : nullptr});
    record.grad_norm = result.norm;
    record.skipped = result.skipped;
    const double waited = agree(loss_sum.item<double>() / static_cast<double>(micro_batches), record.loss);
    const double seconds = seconds_since(begin);
    const shard::Statistics after = sharded_.statistics();
    record.step_ms = seconds * 1e3;
    record.comm_ms =
        1e3 * (waited + after.exposed_gather - before.exposed_gather + after.exposed_reduce - before.exposed_reduce);
    record.tokens_per_second = static_cast<double>(plan_.tokens_per_step) / seconds;
    return record;
  }

  at::Tensor loss_of(const data::Batch& batch) {
    return model_->forward(batch.tokens.to(fabric_->device()), batch.targets.to(fabric_->device()));
  }

  /// Step 3. Every rank must end after the same step, or the others would wait for it: so a signal that reached one
  /// rank is told to all. Returns the seconds that it took.
  double agree(double loss, double& mean) {
    const os::TimePoint begin = os::now();
    at::Tensor shared = at::zeros({2}, at::TensorOptions().dtype(at::kDouble));
    double* values = shared.mutable_data_ptr<double>();
    values[0] = loss;
    values[1] = stop_.signal();
    at::Tensor reduced = shared.to(fabric_->device());
    fabric_->everyone().all_reduce(reduced);
    reduced = reduced.cpu();
    mean = reduced.const_data_ptr<double>()[0] / fabric_->size();
    // Ranks may have had different signals; what counts is that there was one.
    if (reduced.const_data_ptr<double>()[1] > 0)
      stopped_by_ = stop_.signal() > 0 ? stop_.signal() : os::signal_terminate;
    return seconds_since(begin);
  }

  /// The mean loss over the first eval_batches * batch_per_rank * ranks held-out samples; nothing if none are held out.
  std::optional<double> evaluate() {
    const int64_t batches = config_.train.eval_batches;
    if (batches == 0 || plan_.validation_samples == 0) return std::nullopt;
    if (leads()) progress_->clear();
    const at::NoGradGuard no_grad;
    model_->eval();
    double sum = 0;
    for (int64_t i = 0; i < batches; ++i) {
      sum += loss_of(loader_.validation_batch(i)).item<double>();
    }
    return sharded_.sum_over_ranks(sum) / static_cast<double>(batches * fabric_->size());
  }

  void warn_of(const StepRecord& record) {
    // A loss scaler looks for the highest scale that does not overflow: with one, such steps are part of the plan.
    if (leads() && record.skipped && !scaler_) {
      log(LogLevel::warning, cat("step ", record.step, ": the gradients were not finite, nothing was updated"));
    }
    const int64_t misses = sharded_.statistics().pool_misses;
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
    if (!leads()) return;
    facts.layout = mesh::Layout(fabric_->size(), plan_.strategy.degrees);
    facts.hosts = fabric_->world().hosts();
    facts.parameters = sharded_.parameter_count();
    facts.tokens_per_step = plan_.tokens_per_step;
    facts.device = c10::DeviceTypeName(fabric_->device().type(), true);
    facts.precision = dtype_name(plan_.precision.parameters.value_or(at::kFloat));
    facts.seconds = seconds;
    facts.bytes_sent = fabric_->counters().bytes();
    facts.engine = sharded_.statistics();
    facts.stopped_by = stopped_by_;
    const RunFigures figures = metrics_->figures();
    os::files().write(folder_ + "/summary.json", make_summary(figures, facts).dump(2) + "\n");
    progress_->clear();
    if (!sample.empty()) progress_->say("\nA sample:\n" + sample + "\n");
    progress_->say(final_line(figures, facts));
  }

  std::string make_sample() {
    const at::NoGradGuard no_grad;
    model_->eval();
    std::vector<int64_t> prompt;
    for (const char byte : config_.train.sample_prompt) prompt.push_back(static_cast<unsigned char>(byte));
    const auto logits = [&](const at::Tensor& tokens) { return model_->forward(tokens.to(fabric_->device())).cpu(); };
    const std::vector<int64_t> tokens = model::generate(
        logits, prompt,
        {.tokens = config_.train.sample_tokens, .window = config_.data.sequence_length, .seed = config_.run.seed});
    prompt.insert(prompt.end(), tokens.begin(), tokens.end());
    return printable(prompt);
  }

  std::string final_line(const RunFigures& figures, const RunFacts& facts) const {
    std::string line = cat(stopped_by_ == 0 ? "done: " : "stopped: ", figures.steps, " steps in ",
                           short_time(facts.seconds), ", loss ", figures.final_loss);
    if (figures.val_loss) line += cat(", validation loss ", *figures.val_loss);
    return line + cat(", ", short_number(figures.tokens_per_second), " tokens/s; see ", folder_, "/summary.json");
  }

  std::vector<uint64_t> from_all_ranks(uint64_t value) {
    at::Tensor values = at::zeros({fabric_->size()}, at::TensorOptions().dtype(at::kDouble));
    values.mutable_data_ptr<double>()[fabric_->rank()] = static_cast<double>(value);
    at::Tensor shared = values.to(fabric_->device());
    fabric_->everyone().all_reduce(shared);
    values = shared.cpu();
    const double* data = values.const_data_ptr<double>();
    return {data, data + values.numel()};
  }

  const Config& config_;
  const Plan& plan_;
  StopRequest stop_;
  std::shared_ptr<comm::Fabric> fabric_;
  data::Loader loader_;
  model::Gpt model_;
  shard::Sharded sharded_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Schedule schedule_;
  std::optional<optim::LossScaler> scaler_;
  int stopped_by_ = 0;
  int64_t misses_seen_ = 0;
  // Rank 0's.
  std::string folder_;
  std::optional<Metrics> metrics_;
  std::optional<Progress> progress_;
};

}  // namespace

int train(const Config& config, const Plan& plan, const mesh::World& world) {
  comm::FabricOptions options;
  options.backend = config.run.backend;
  options.device = plan.device;
  options.connect_deadline = milliseconds(config.run.connect_deadline_seconds);
  options.deadline = milliseconds(config.run.deadline_seconds);
  auto fabric = comm::Fabric::connect(world, options);
  return Run(config, plan, std::move(fabric)).run();
}

}  // namespace tesserae::train
