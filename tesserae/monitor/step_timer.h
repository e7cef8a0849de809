#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tesserae/base/work.h"
#include "tesserae/comm/call_log.h"
#include "tesserae/comm/link_log.h"
#include "tesserae/monitor/step_times.h"
#include "tesserae/os/clock.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/step_observer.h"

namespace tesserae::monitor {

/// What a rank does at this moment.
struct Now {
  int64_t step = 1;  ///< at which it is
  Stage stage = Stage::between;
  int unit = -1;
  double seconds = 0;    ///< since it began with that
  int64_t progress = 0;  ///< grows with every event, also while nothing is trained
};

/// Times the steps of a rank by stage and unit: watches the engines that it is attached to, and is told by whoever
/// trains of what no engine sees.
///
///   auto timer = std::make_shared<StepTimer>();
///   timer->attach(engine);
///   timer->enter(Stage::data);  ...  timer->enter(Stage::optimizer);  ...  timer->end_step(step);
///
/// Without end_step(), a step ends when an engine that has reduced its gradients begins its next forward. Forwards
/// without gradients are no training: they are a part of the stage in which they happen.
///
/// It adds no synchronisation: on a device the times are the host's. A step costs two readings of the clock for each
/// event and keeps up to `most_spans` spans. Events and enter() come from the thread that trains (or autograd's in its
/// place); what is asked may be asked by any thread.
class StepTimer final : public shard::StepObserver, public std::enable_shared_from_this<StepTimer> {
 public:
  static constexpr size_t most_spans = 4096;
  static constexpr size_t kept_steps = 256;
  static constexpr size_t speed_steps = 16;

  StepTimer();

  /// Watches all units that `engine` has now, and the lanes on which they travel. Between steps. Twice is once.
  void attach(const shard::Engine& engine);
  void detach(const shard::Engine& engine);

  /// Called after each step, on the thread that trains; empty: nobody.
  void at_end_of_step(std::function<void()> call);

  void enter(Stage stage);
  /// Step `step` is over, and the next one begins.
  void end_step(int64_t step);
  /// The steps after `step` are undone: the next one to end is `step` + 1.
  void go_back(int64_t step);
  /// The next forward takes in so many tokens: from who knows it where the model does not say so (base/work.h).
  void next_forward_has(int64_t tokens);
  /// The process did not run for that long, until now; from the thread that found out.
  void was_stopped(double seconds);

  Now now() const;
  /// The newest steps, at most kept_steps, oldest first; those after step `after`.
  std::vector<StepTimes> steps(int64_t after = 0) const;
  /// The newest step whose number `every` divides; nothing if none of the newest few is.
  std::optional<Timeline> timeline(int64_t every) const;
  /// Keeps the timelines of steps `first` to `last`, of those that have not ended yet, until they are taken.
  void keep(int64_t first, int64_t last);
  /// Once the last of them has ended: what was kept, once.
  std::optional<std::vector<Timeline>> take_kept();
  /// Names of units, as spans number them: of all engines, in the order in which they were attached.
  std::vector<std::string> units() const;
  /// What left this rank on its lanes in the newest step, bytes by verb (verb_names).
  PerVerb sent() const;
  /// What this rank had to do in the newest step, evaluations left out.
  PerWork work() const;
  /// What the groups of this process sent in the newest step, by hop; `quickest`: of the newest `speed_steps`.
  std::vector<comm::LinkUse> links() const;

  void begin_step(shard::ShardedUnit& unit, bool accumulating) override;
  void before_forward(shard::ShardedUnit& unit) override;
  void before_gather(shard::ShardedUnit& unit) override;
  void after_gather(shard::ShardedUnit& unit) override;
  void after_forward(shard::ShardedUnit& unit) override;
  void begin_backward(shard::ShardedUnit& unit, bool boundary) override;
  void before_backward(shard::ShardedUnit& unit) override;
  void end_backward(shard::ShardedUnit& unit) override;
  void after_backward(shard::ShardedUnit& unit) override;

 private:
  void mark(Stage stage, int unit);
  void count_work(double own);
  void close_step(int64_t step);
  void add_span(int lane, Stage stage, int unit, os::TimePoint begin, double seconds);
  void take_calls();
  void take_work();
  void take_links();
  int unit_named(const std::string& name) const;
  int number_of(const shard::ShardedUnit& unit) const;

  mutable std::mutex mutex_;  // guards all below
  std::vector<std::string> units_;
  std::map<const shard::Engine*, int> first_unit_;    // the number of the engine's root
  std::vector<std::shared_ptr<comm::CallLog>> logs_;  // of the lanes: gather, reduce
  std::function<void()> at_end_;
  bool begun_ = false;
  bool told_ = false;                       // end_step() is called
  std::set<const shard::Engine*> reduced_;  // whose gradients have come to their owners in this step
  bool evaluating_ = false;                 // in a forward without gradients
  Stage phase_ = Stage::forward;            // forward or backward
  Stage around_ = Stage::between;           // what goes on after the backward: an optimizer may call both
  int64_t progress_ = 0;
  PerVerb sent_{}, open_sent_{};
  PerWork work_{}, open_work_{}, seen_work_{};  // seen: work_of_this_thread() of ...
  std::thread::id worker_;                      // ... the thread that runs the forwards, when it was last looked at
  int64_t next_tokens_ = 0;
  std::deque<std::vector<comm::LinkUse>> links_;  // of the newest steps
  std::vector<int> forwards_;                     // units, the outermost first

  // Since when it is in what.
  Stage stage_ = Stage::between;
  int unit_ = -1;
  os::TimePoint since_;
  double waited_ = 0;     // comm::waited_by_this_thread() then
  double processor_ = 0;  // os::thread_time() when it changed to stage_ ...
  double worked_ = 0;     // ... and what it has worked in it since, in seconds
  std::thread::id thread_;
  std::shared_ptr<const std::atomic<bool>> waiting_;  // that thread's

  os::TimePoint step_began_;
  StepTimes open_;
  uint64_t faults_ = 0;   // of the process when the step began
  double open_stop_ = 0;  // seconds in it for which the process did not run
  Timeline open_spans_;
  int64_t ended_ = 0;  // the newest step that has
  std::deque<StepTimes> steps_;
  std::vector<Timeline> timelines_;
  int64_t keep_first_ = 0, keep_last_ = -1;  // -1: nothing is asked for
  std::vector<Timeline> kept_;
};

}  // namespace tesserae::monitor
