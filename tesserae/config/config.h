#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/config/json.h"
#include "tesserae/context/parallel.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/model/config.h"
#include "tesserae/offload/tier.h"
#include "tesserae/shard/options.h"

namespace tesserae::config {

/// A validated configuration as C++ values; schema.json describes each key. Values that derive from other keys are
/// filled in, except those that need the data (the vocabulary), the machine (device, precision auto) or the number of
/// ranks.
struct Config {
  struct Run {
    std::string folder;
    std::optional<std::string> weights_folder;  ///< unset: weights are not written
    uint64_t seed = 0;
    int64_t log_every = 0;
    int nproc = 1;
    std::string device, backend;
    double connect_deadline_seconds = 0, deadline_seconds = 0;
  } run;

  model::GptConfig model;             ///< shape, sequence length and seed; neither device nor dtype
  std::optional<int64_t> vocabulary;  ///< unset: that of the data
  bool checkpoint_activations = false;

  struct Data {
    std::vector<std::string> path;
    std::vector<double> weights;  ///< of each path; empty: they are one stream
    std::string format;
    std::vector<std::string> suffixes;
    int64_t sequence_length = 0;
    double validation_fraction = 0;
  } data;

  struct Train {
    int64_t steps = 0, batch_per_rank = 0, accumulate = 0;
    shard::Accumulation accumulation = shard::Accumulation::local;
    double clip_norm = 0;
    int64_t eval_every = 0, eval_batches = 0, sample_tokens = 0;
    std::string sample_prompt;
  } train;

  struct Checkpoint {
    std::optional<std::string> folder;  ///< unset: "checkpoints" in the run folder
    int64_t every_steps = 0;
    double every_minutes = 0;
    int keep = 0;
    bool asynchronous = false;
    bool read_back = false;
    double deadline_minutes = 0;
    bool stop_on_error = true;
    int64_t memory_every_steps = 0;
    bool memory_on_other_hosts = true;

    bool enabled() const { return folder || every_steps > 0 || every_minutes > 0 || memory_every_steps > 0; }
  } checkpoint;

  /// What becomes of steps whose numbers are bad.
  struct BadSteps {
    enum class Policy { skip, rollback, stop };
    Policy policy = Policy::skip;
    int64_t limit = 0;
    std::optional<double> loss_spike;  ///< unset: a loss may jump as it likes
  } bad_steps;

  struct Recovery {
    int replacements = 0, max_restarts = 0;
    int min_ranks = 0;   ///< 0: a rank that is not replaced ends the run
    std::string shared;  ///< empty: the loss of the first host ends it
    int64_t check_replicas_every_steps = 0;
  } recovery;

  /// How a run hears that it is to end early, beside signals, and how it ends then.
  struct Preemption {
    std::string file, command;  ///< empty: none
    double every_seconds = 0;
    int exit_code = 0;
  } preemption;

  struct Monitor {
    std::optional<bool> enabled;  ///< unset: where there is a run folder
    double every_seconds = 0.5;
    std::optional<int> port;  ///< of the page; unset: it is not served
    std::string host;
    bool allow_control = false;
  } monitor;

  /// Where the training state lies between its uses, and what all may have of a host's memory.
  struct Offload {
    offload::Tiers tiers;
    bool activations = false;                       ///< they leave between forward and backward
    int horizon = 0;                                ///< activation_loading_horizon
    int64_t smallest = 0;                           ///< bytes of an activation that leaves
    std::optional<std::vector<std::string>> units;  ///< patterns of their names; unset: all

    /// Whether the activations of a unit of that name leave.
    bool leaves(const std::string& unit) const;
    std::string folder;
    std::optional<int64_t> memory_limit;  ///< bytes of a host
  } offload;

  struct Optimizer {
    std::string name;
    double lr = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0, momentum = 0;
    std::string schedule;
    int64_t warmup_steps = 0;
    double min_lr_ratio = 0;
  } optimizer;

  std::string precision;              ///< "fp32", "bf16", "fp16", "auto" or "custom"
  shard::Precision custom_precision;  ///< of "custom"

  struct Sharding {
    int hybrid_shard_degree = 0;
    bool automatic = false;  ///< hybrid_shard_degree is "auto"
    std::optional<mesh::Degrees> degrees;
    std::string strategy;  ///< empty: none was named
    std::optional<bool> free_after_forward, free_after_backward;
    int limit_all_gathers = 0, limit_reductions = 0;
    comm::Wire parameter_wire = comm::Wire::exact, gradient_wire = comm::Wire::exact;
    int tensor_parallel_degree = 1, context_parallel_degree = 1, expert_parallel_degree = 1;
    context::Method context_parallel_method = context::Method::automatic;
    bool sequence_parallel = false;
    bool warn_of_pool_misses = false;
  } sharding;

  int64_t planned_steps = 0;  ///< of the job, for the automatic choice of degrees
  double dial_headroom = 0;   ///< for the schedule: dial_schedule()

  Json resolved;  ///< what is written to the run folder
};

/// `name`: of the configuration file, for the default run folder. Throws ConfigError for keys that contradict each
/// other.
Config make_config(const Json& resolved, const std::string& name);

/// Throws ConfigError if both `degrees` and `hybrid_shard_degree` are given, if the schedule of the section `dial` is
/// no schedule, and if there is one beside "auto".
void check_one_dial(const Json& resolved);

/// Bytes of a key that takes a number of them or a text such as 2GiB. Throws ConfigError.
int64_t read_size(const std::string& key, const Json& value);

/// The section `preemption` of a resolved configuration, of this or of tsm.init. Throws ConfigError for an exit code
/// that means something else.
Config::Preemption read_preemption(const Json& resolved);

/// resolve_config and make_config.
Config load_config(const std::string& path, const std::vector<std::string>& assignments = {});

/// The strategy of this configuration for so many ranks; with "auto" that of FULL_SHARD, until the job has met and its
/// degrees are chosen. Throws ConfigError naming the key whose degree does not fit.
mesh::Strategy strategy_of(const Config& config, int ranks);

/// The schedule of the section `dial` (of a resolved configuration, of this or of tsm.init) for so many ranks: steps
/// and degrees. Throws ConfigError naming the entry whose degrees do not fit.
std::vector<std::pair<int64_t, mesh::Degrees>> dial_schedule(const Json& resolved, int ranks);

/// The dtypes of this configuration where `auto` means bf16 (`has_bf16`) or fp32.
shard::Precision precision_of(const Config& config, bool has_bf16);

}  // namespace tesserae::config
