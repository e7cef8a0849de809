#include <cmath>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/checkpoint/crash_point.h"
#include "tesserae/comm/agree.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/os/seconds.h"
#include "tesserae/preemption/agree.h"
#include "tesserae/shard/replica_check.h"
#include "tesserae/train/dial_setup.h"
#include "tesserae/train/progress.h"
#include "tesserae/train/recovery.h"
#include "tesserae/train/run.h"

// What a run has beside its steps: the state, what saves it, the monitor and its page, the dial, the memory limit, and
// who may ask it to stop. Made at its start; a recovery and another number of ranks make parts of it again.

namespace tesserae::train {

void Run::start(const Resume& resume) {
  if (config_.sharding.automatic) {
    links_ = cost::measure_links(*fabric_);
    choose_degrees(setup_, config_, fabric_, *links_);
  }
  make_state(TrainingState::Values::initial);
  if (!folders_) folders_ = choose_folders(*fabric_, config_, resume);  // else ranks were lost while it began
  remember(run_key, folders_->run.native());
  checkpoint::crash_point("run-begins", fabric_->rank());
  make_services();
  origin_ = restore(*state_, resume, *folders_, checkpoints_->memory());
  checkpoints_->begin();
  if (leads()) output_.emplace(config_, setup_, *folders_, origin_);
  serve_page();
  if (leads() && state_->disk != nullptr) output_->say(describe_offload());
  tell_of_activations();
  warn_if_nothing_is_compared();
  warn_if_nothing_is_kept();
  whole_ = true;
  comm::lowest_rank_with(*fabric_, false);  // all have it
  remember(strategy_key, strategy_json(setup_.strategy, setup_.tiers, setup_.choice).dump());
  checkpoint::crash_point("run-begun", fabric_->rank());
}

/// A lost rank is survived with what others, or a storage, have of its state.
void Run::warn_if_nothing_is_kept() const {
  if (!leads() || !membership_.recovers() || fabric_->size() == 1) return;
  if (config_.checkpoint.enabled() || shard::has_replicas(state_->sharded.engine())) return;
  log(LogLevel::warning, cat("at ", to_string(state_->setting()),
                             " no rank has a copy of another's state, and nothing is saved: the loss ",
                             "of one will end the job, whatever `recovery` says; ", how_to_keep_it));
}

void Run::make_state(TrainingState::Values values) {
  memory_limit_.reset();  // it keeps the scratch file of the state before, whose room this one needs
  loads_.reset();
  state_.reset();
  state_ = std::make_unique<TrainingState>(config_, setup_, fabric_, values);
  loads_.emplace(*state_->model);
  counted_ = 0;
  limit_memory();
}

/// What lies on a disk now, or does not, makes another limit.
void Run::limit_memory() {
  memory_limit_.reset();
  if (state_->disk == nullptr && !config_.offload.memory_limit) return;
  const auto here = static_cast<int>(fabric_->world().host_ranks(fabric_->rank()).size());
  memory_limit_.emplace(state_->disk, offload::memory_of_rank(config_.offload.memory_limit, here));
}

/// "parameters on disk, optimizer on disk: io_uring past the page cache in /var/tmp; 315 MB of memory a rank".
std::string Run::describe_offload() const {
  const auto limit = memory_limit_->bytes();
  return cat(to_string(state_->setting().tiers), ": ", state_->disk->describe(), "; ",
             limit ? cat(short_bytes(static_cast<uint64_t>(*limit)), " of memory a rank") : "no memory limit");
}

void Run::warn_of_memory(double used) const {
  log(LogLevel::warning,
      cat("the memory limit cannot be held: a rank has ", short_bytes(static_cast<uint64_t>(*memory_limit_->bytes())),
          " and needed ", short_bytes(static_cast<uint64_t>(used)),
          " for gathered parameters, activations, the program itself and a window for what lies on the disk",
          "; lower train.batch_per_rank, recompute activations, or start fewer ranks on a host"));
}

/// What saves the state. The dial comes later: it wants to know the step.
void Run::make_services() {
  state_->run = folders_->run_identity;
  checkpoints_.emplace(config_, *state_, *folders_,
                       Checkpointing::Callbacks{.before_save =
                                                    [this] {
                                                      if (output_) output_->sync();
                                                    },
                                                .say =
                                                    [this](const std::string& line) {
                                                      if (output_) output_->say(line);
                                                    },
                                                .committed =
                                                    [this](int64_t step) {
                                                      if (!leads()) return;
                                                      membership_.remember("saved", cat(step));
                                                      saved_ = step;
                                                      tell("checkpoint", cat("step ", step, " is saved"));
                                                    }});
  watch();
}

/// What a step's parts take on every rank. Before the first step of this meeting of the ranks.
void Run::watch() {
  monitor_.reset();
  if (!config_.monitor.enabled.value_or(true)) return;
  monitor::Json job = {{"source", "tesserae train"},
                       {"steps", config_.train.steps},
                       {"parameters", setup_.parameters},
                       {"tokens_per_step", setup_.tokens_per_step},
                       {"degrees", dial::to_json(state_->setting().degrees)},
                       {"offload", dial::to_json(state_->setting().tiers)},
                       {"axes",
                        {{"tensor", setup_.mesh.degree(mesh::axes::tensor)},
                         {"context", setup_.mesh.degree(mesh::Axis::context)},
                         {"expert", setup_.mesh.degree(mesh::Axis::expert)}}}};
  try {
    monitor_ = std::make_unique<monitor::Monitor>(
        fabric_, monitor::MonitorOptions{
                     .folder = folders_->run,
                     .job = std::move(job),
                     .every = os::milliseconds(config_.monitor.every_seconds),
                     .optimizer_bytes = [this] { return static_cast<double>(state_->optimizer->state_bytes()); }});
  } catch (const IoError& error) {
    log(LogLevel::warning, cat("nobody watches this run: ", error.what()));
    return;
  }
  monitor_->watch(state_->sharded.engine());
}

/// Of the rank that writes, which may be another one since ranks were lost. A page that cannot be served is no reason
/// not to train.
void Run::serve_page() {
  if (page_ || !output_ || !config_.monitor.port) return;
  const auto& asked = config_.monitor;
  try {
    page_ =
        std::make_unique<watch::Server>(folders_->run, watch::ServerOptions{.host = asked.host,
                                                                            .port = static_cast<uint16_t>(*asked.port),
                                                                            .token = {},
                                                                            .allow_control = asked.allow_control,
                                                                            .begins = true});
    output_->say(cat("page: ", page_->url()));
  } catch (const Error& error) {
    log(LogLevel::warning, cat("the run has no page (`tesserae watch` shows it): ", error.what()));
  }
}

void Run::tell(const std::string& kind, const std::string& text) {
  if (monitor_) monitor_->tell({.step = state_->step, .kind = kind, .rank = -1, .text = text});
}

/// Collective.
void Run::make_dial() {
  if (monitor_) monitor_->timer().go_back(state_->step);  // it began before the state was restored
  dial::DialOptions options =
      dial_options(config_, *state_, folders_->run, links_, [this](const std::string& line) { output_->say(line); });
  std::erase_if(options.schedule, [this](const auto& entry) { return entry.step <= scheduled_until_; });
  options.cannot_scale = [this](int ranks) { return cannot_scale(ranks); };
  options.experts = expert_degree();
  options.cannot_share_out = [this](int degree) { return cannot_share_out(degree); };
  options.server = std::move(dial_server_);
  dial_ = std::make_unique<dial::Dial>(fabric_, state_->setting(), std::move(options));
}

/// To those who ask this process to end. Once it is known which ranks share a host: one of them asks for all. Who asked
/// may be gone.
void Run::listen() {
  const bool asks = preemption::asks_for_host(fabric_->world());
  if (stop_ && (asks == asks_for_host_ || stop_->notice())) return;
  stop_.reset();
  asks_for_host_ = asks;
  const auto& asked = config_.preemption;
  preemption::Sources sources{.second_demand_ends = true, .every = os::milliseconds(asked.every_seconds)};
  if (asks) {
    sources.file = asked.file;
    sources.command = asked.command;
  }
  stop_.emplace(sources);
}

/// Before the first step, from the shapes of the model. Experts get tokens as their routers say: nobody knows that yet.
void Run::tell_of_activations() {
  if (!output_ || state_->activations == nullptr || setup_.model.experts > 0) return;
  const offload::Activations& activations = *state_->activations;
  const offload::ActivationOptions& options = activations.options();
  const double bytes = cost::leaving_bytes(setup_.model, execution_of(config_, setup_), leaving_of(config_));
  if (bytes == 0) {
    log(LogLevel::warning,
        cat("offload.activations: no unit", config_.offload.units ? " that offload.activation_units names" : "",
            " saves a tensor of ", short_bytes(static_cast<uint64_t>(options.smallest)),
            " or more beyond the horizon of ", options.horizon, ", so all of them stay"));
    return;
  }
  forecast_ = bytes;
  const auto of_step = static_cast<uint64_t>(bytes * static_cast<double>(config_.train.accumulate));
  output_->say(cat("activations: ", short_bytes(of_step), " a step to ", activations.shelf(), " and back, ",
                   options.horizon, options.horizon == 1 ? " unit" : " units", " ahead"));
}

/// The first step tells how much it is.
void Run::compare_with_forecast() {
  if (!output_ || state_->activations == nullptr || std::exchange(compared_, true)) return;
  const auto seen = static_cast<double>(state_->activations->forecast());
  if (std::abs(seen - forecast_) <= 0.03 * forecast_) return;
  const auto of_step = static_cast<uint64_t>(seen * static_cast<double>(config_.train.accumulate));
  output_->say(cat("activations: ", short_bytes(of_step), " a step, as the first one shows"));
}

}  // namespace tesserae::train
