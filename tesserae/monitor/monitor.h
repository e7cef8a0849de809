#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/monitor/board.h"
#include "tesserae/monitor/exchange.h"
#include "tesserae/monitor/pulse.h"
#include "tesserae/monitor/requests.h"
#include "tesserae/monitor/run_files.h"
#include "tesserae/monitor/step_timer.h"
#include "tesserae/os/fork.h"

namespace tesserae::monitor {

struct MonitorOptions {
  os::Path folder;                                ///< of the run; empty: nothing is written
  Json job = Json::object();                      ///< what now.json says of the job, besides what the fabric knows
  std::chrono::milliseconds every{500};           ///< how often ranks tell of themselves, at most
  std::function<double()> optimizer_bytes = {};   ///< of this rank's optimizer state; called between steps
  std::function<std::string()> more_stacks = {};  ///< of another language, as text; called from any thread
};

/// Watches the ranks of a job, each with one of these: times their steps, collects that on rank 0, finds out who is
/// slow or silent, and writes it to RUN/monitor/ (run_files.h), where `tesserae watch` and people find it.
///
///   Monitor monitor(fabric, {.folder = run});
///   monitor.watch(engine);
///   ... training; monitor.timer().enter(Stage::data) where the trainer knows better than the engine ...
///   monitor.end("done");
///
/// [Note: rounds] A thread in each process, which never touches what trains:
///  1. every so often (`every`; less often, down to every 2 s, where a round takes more than half a millisecond of a
///     processor) it asks the store what rank 0 wants, and sets this rank's report, of all steps that rank 0 does not
///     know yet: it may miss reports;
///  2. rank 0's then reads the reports that there are, without waiting for any, judges the steps of which all have
///     told, and replaces the files;
///  3. another thread notices when the process did not run (pulse.h), also in the middle of a round; no report is made
///     before it has looked, since steps are judged by what is said of them first.
/// Training does not notice what fails: a store (exchange.h), a folder that cannot be written. A round that fails is
/// left out, and the next one made.
///
/// watch() and end() come from the thread that trains; the others from any.
class Monitor {
 public:
  Monitor(std::shared_ptr<comm::Fabric> fabric, MonitorOptions options);
  /// The job has failed, unless end() was called.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Between steps. The engine may end earlier than the monitor.
  void watch(shard::Engine& engine);
  StepTimer& timer() { return *timer_; }

  /// Rank 0's: something of the job has changed, or happened; elsewhere it does nothing.
  void set_job(const std::string& key, Json value);
  void tell(Event event);

  /// What now.json holds: on rank 0 of the whole job, elsewhere of this rank alone.
  Json status() const;
  /// Waits for one more round, so that the last steps are told of, and says how the job ended. No reports after it.
  void end(const std::string& how);

 private:
  void run(const std::stop_token& stop);
  void round(bool last);
  double pause_for(double cost, double allowed) const;
  Report make_report();
  void measure_memory();
  void after_step();
  void find_program_bytes();
  MemoryUse counted_memory() const;
  void lead(std::vector<Event>& events);
  void open_folder();
  void take_wish(const Wish& wish);
  Json now() const;
  bool leads() const { return fabric_->rank() == 0; }

  const os::ForkGuard made_;
  std::shared_ptr<comm::Fabric> fabric_;
  const MonitorOptions options_;
  std::shared_ptr<StepTimer> timer_;
  const int ranks_here_;

  // What the training thread and the other leave for each other.
  mutable std::mutex mutex_;
  std::optional<MemoryUse> memory_;
  bool wants_memory_ = true;
  Json job_;
  std::optional<std::string> how_;  // the job has ended
  std::vector<Event> events_;

  std::vector<std::weak_ptr<shard::Engine*>> engines_;  // the training thread's
  std::optional<double> program_bytes_;                 // written by it once, before the first step, with the mutex

  // The thread's.
  std::optional<Exchange> exchange_;  // none: this rank is alone
  Wish wish_;
  int64_t number_ = 0;
  // What was asked for last, and of which wish it is.
  std::string stacks_;
  int64_t stacks_of_ = 0;
  std::vector<Timeline> kept_;
  int64_t kept_of_ = 0;
  MemoryUse measured_;
  std::optional<os::TimePoint> memory_measured_;
  double memory_pause_ = 0;         // until it is measured again
  double spent_apart_ = 0;          // of a round, on what has a pause of its own: seconds of a processor
  mutable std::mutex board_mutex_;  // status() reads the board
  Board board_;
  std::optional<RunFiles> files_;
  std::unique_ptr<Requests> requests_;
  int64_t shown_timeline_ = 0;

  std::condition_variable_any woken_;
  std::mutex wake_mutex_;
  std::unique_ptr<Pulse> pulse_;
  std::unique_ptr<std::jthread> thread_;
};

}  // namespace tesserae::monitor
