#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/comm/membership.h"
#include "tesserae/config/config.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/dial/dial.h"
#include "tesserae/experts/step_loads.h"
#include "tesserae/mesh/world.h"
#include "tesserae/monitor/monitor.h"
#include "tesserae/offload/memory_limit.h"
#include "tesserae/optim/schedule.h"
#include "tesserae/os/clock.h"
#include "tesserae/preemption/watch.h"
#include "tesserae/train/checkpointing.h"
#include "tesserae/train/job_setup.h"
#include "tesserae/train/metrics.h"
#include "tesserae/train/restore.h"
#include "tesserae/train/resume.h"
#include "tesserae/train/run_output.h"
#include "tesserae/train/training_state.h"
#include "tesserae/watch/server.h"

namespace tesserae::train {

/// Nothing is left to go on from: the job ends. (As with other CommErrors, this rank is not to blame.)
class StateLost : public comm::CommError {
 public:
  using CommError::CommError;
};

/// Replicas of the state differ, and nothing says which are right: the run has ended.
class ReplicasDiffer : public Error {
 public:
  using Error::Error;
};

/// One rank of a training run: run.cpp has its steps, rollback.cpp what becomes of bad ones,
/// verification.cpp whether replicas agree, recovery.cpp what it does after another rank was lost, scaling.cpp how it
/// gets another number of ranks, fewer_ranks.cpp how that begins with a loss, sharing_out.cpp how its experts do.
///
///   Run run(config, setup, resume, world, membership);
///   for (;;) {
///     try {
///       run.meet();
///       if (auto status = run.train()) return *status;
///       // there are to be more or fewer ranks: wait for the next epoch; done if this one has no place in it
///     } catch (const comm::CommError&) {
///       // another rank is lost: wait until somebody has its place, in the next epoch
///     }
///   }
///
/// `config`, as it was written for the ranks with which the job began, and `membership` outlive it. Used from one
/// thread.
class Run {
 public:
  Run(const config::Config& config, JobSetup setup, Resume resume, const mesh::World& world,
      comm::Membership& membership);

  /// Meets the ranks of the job in the epoch of `membership`; the same call for one that is left after a loss and for a
  /// new process, and where the number of ranks has changed. Afterwards all have the state of the same step: that of
  /// the last one that any rank had finished, where the lost rank's part is held by a replica; else that of the newest
  /// snapshot or checkpoint. Those that are left where nobody replaces the lost ones have kept the state instead, given
  /// it up and asked for a number of ranks. Throws a CommError, also when another rank is lost meanwhile; StateLost.
  void meet();
  /// To the end; returns the exit status. Nothing: the state is saved and given up, and the job is to go on in an epoch
  /// with another number of ranks. Throws what train() (trainer.h) throws.
  std::optional<int> train();

  /// The launcher's ranks for which a failed operation has waited (comm::Timeout::missing).
  std::vector<int> missing(const comm::CommError& failure) const;

 private:
  struct Standing;
  /// What is left as it was while experts are shared out over other ranks, until all ranks have what comes after.
  struct Before {
    int experts = 0;  // over how many ranks
    std::unique_ptr<TrainingState> state;
  };

  // run.cpp
  void connect();
  void start(const Resume& resume);
  void make_state(TrainingState::Values values);
  void make_services();
  std::string describe_offload() const;
  void warn_of_memory(double used) const;
  void listen();
  void watch();
  void serve_page();
  void tell(const std::string& kind, const std::string& text);
  void make_dial();
  void train_step();
  void count_step();
  void time_step();
  void agree();
  void finish_step();
  void limit_memory();
  void turn_dial(const shard::Setting& to);
  at::Tensor loss_of(const data::Batch& batch);
  std::optional<double> evaluate();
  void warn_of(const StepRecord& record);
  void tell_of_activations();
  void compare_with_forecast();
  void finish(double seconds);
  void write_weights(const std::string& folder);
  std::string make_sample();
  std::vector<uint64_t> from_all_ranks(uint64_t value);
  optim::StepOptions step_options();
  std::string verdict(double norm) const;
  bool leads() const { return fabric_->rank() == 0; }

  // rollback.cpp
  bool leaves_out_bad_step();
  bool roll_back(const std::string& what, nlohmann::json& entry);
  std::string end_of_bad_run();

  // verification.cpp
  void warn_if_nothing_is_compared();
  void warn_if_nothing_is_kept() const;
  void check_replicas();

  // scaling.cpp
  std::string cannot_scale(int ranks) const;
  bool keep_for_change();
  std::string last_kept() const;
  bool leave_for_scaling();
  nlohmann::json told_to(int ranks, nlohmann::json told) const;
  void ask_for_ranks(int ranks, const nlohmann::json& told);
  void leave(const std::string& why);
  void change_size();
  nlohmann::json scaling_at_hand();
  void take_up(const nlohmann::json& told, Standing all, os::TimePoint begin);
  void forget_scaling(const std::string& why);

  // fewer_ranks.cpp
  void go_on_with_fewer();
  int ranks_for_those_left(int most) const;
  nlohmann::json what_those_left_tell(const Standing& all);
  std::string keep_what_is_left(const Standing& all, const nlohmann::json& told);

  // sharing_out.cpp
  int expert_degree() const;
  std::string cannot_share_out(int degree) const;
  at::Tensor window_for_experts(int degree);
  bool share_out();
  void hand_over(int degree, const nlohmann::json& strategy, const at::Tensor& window);
  bool go_through_checkpoint(int degree, const nlohmann::json& strategy);
  void set_experts(int degree);
  void hear_of_experts();
  void choose_mesh(int degree);

  // recovery.cpp
  Standing agree_on_standing();
  void end_services(const std::string& why);
  void end_broken_step();
  std::string go_on(const Standing& all);
  void begin_output(const std::optional<Origin>& origin);
  nlohmann::json hear_of_reference(const Standing& all);
  void catch_up(const Standing& all, const nlohmann::json& told);
  bool take_over(const Standing& all, const nlohmann::json& told);
  std::string go_back(const Standing& all);
  std::optional<Origin> newest_of_this_run(int64_t reached);
  nlohmann::json past() const;
  nlohmann::json tell() const;
  void hear(const nlohmann::json& told);
  void give_up_state();
  void take_strategy(const nlohmann::json& told);
  void require_saved(const std::string& lost, const Standing& all);
  void remember(const std::string& what, const std::string& value);
  std::string remembered(const std::string& what);
  int64_t newest_saved();

  const config::Config& launched_;  // as a new process of this job has it
  const int written_for_;           // ranks
  config::Config written_;          // the same, but for what was changed since
  config::Config config_;           // for those that there are
  JobSetup setup_;
  mesh::World world_;
  const Resume resume_;
  comm::Membership& membership_;
  std::optional<preemption::Watch> stop_;
  bool asks_for_host_ = false;  // of stop_
  optim::Schedule schedule_;
  std::shared_ptr<comm::Fabric> fabric_;
  std::unique_ptr<TrainingState> state_;
  std::optional<Before> before_change_;
  std::optional<experts::StepLoads> loads_;
  std::optional<RunFolders> folders_;
  std::optional<RunOutput> output_;  // rank 0's
  std::optional<Checkpointing> checkpoints_;
  Checkpointing::Wishes wishes_;  // of the last step, of all ranks together
  std::optional<Origin> origin_;
  std::unique_ptr<dial::Dial> dial_;
  std::unique_ptr<monitor::Monitor> monitor_;  // null: not wanted
  std::unique_ptr<watch::Server> page_;        // rank 0's; null: not wanted
  std::optional<cost::Links> links_;
  std::optional<shard::Setting> turn_to_;       // agreed on after the last step
  std::optional<dial::Dial::Scaling> scaling_;  // agreed on, and not done yet
  std::optional<os::TimePoint> scaling_began_;
  std::shared_ptr<dial::Server> dial_server_;  // rank 0's, while the dial's ranks change
  int stopped_by_ = 0;                         // a signal, or what counts as one
  std::string stop_reason_;
  std::string broken_off_;  // why a bad step ends the run; empty: none does
  int64_t misses_seen_ = 0;
  std::optional<offload::MemoryLimit> memory_limit_;  // where state lies on a disk
  offload::DiskCounters disk_before_;                 // the step at hand
  double forecast_ = 0;                               // bytes of activations that leave in a micro-batch
  bool compared_ = false;

  // The step at hand, and what recovery needs to know of it.
  bool whole_ = false;                      // state_ is that of step state_->step
  int64_t counted_ = 0;                     // of optimizer->steps_done()
  double own_loss_ = 0;                     // of this rank's data
  std::vector<double> sums_;                // loss and loads: this rank's, and once the norm is known of all ranks
  bool overflow_expected_ = false;          // in the step at hand: the loss scale can still be lowered
  StepRecord record_;                       // of the last step that counted
  bool pending_ = false;                    // it is not evaluated, written and saved yet
  int64_t save_begun_ = 0;                  // the step of the last save before a rank was lost; 0: none
  std::optional<os::TimePoint> last_save_;  // before the last loss
  int64_t scheduled_until_ = -1;            // what the dial's schedule says of these steps has happened
  os::TimePoint step_began_;
  std::optional<os::TimePoint> began_;  // the first step of this process
  shard::Statistics before_;
  nlohmann::json recoveries_ = nlohmann::json::array();
  nlohmann::json scalings_ = nlohmann::json::array();
  nlohmann::json sharings_ = nlohmann::json::array();   // of experts
  nlohmann::json bad_steps_ = nlohmann::json::array();  // what became of each
  nlohmann::json differing_ = nlohmann::json::array();  // replicas that were
  int64_t agreed_ = 0;                                  // the last step after which replicas agreed
  int64_t rolled_back_from_ = 0;                        // before the next step
  int64_t saved_ = 0;                                   // of checkpoints that this process knows to be committed
  std::map<std::string, std::string> known_;            // what was remembered
};

}  // namespace tesserae::train
