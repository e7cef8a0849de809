#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tesserae/shard/engine.h"
#include "tesserae/shard/step_observer.h"

namespace tesserae::shard {

/// What happened to one unit on this rank, and when.
struct StepEvent {
  enum class Kind {
    begin_step,      ///< a forward of the root begins
    before_forward,  ///< the unit's forward begins
    before_gather,   ///< the training thread needs the unit's parameters ...
    after_gather,    ///< ... and has them: the time between is exposed communication and the host's own work
    after_forward,
    before_backward,
    before_reduce,  ///< gradients of a buffer start their way to their owners
    after_free,
    end_backward,  ///< the whole backward is over
  };
  using Clock = std::chrono::steady_clock;

  Kind kind;
  int unit;  ///< ShardedUnit::index()
  Clock::time_point time;
};

/// Records the events of all units of an engine, the newest `capacity` of them. It adds no synchronisation: on a device
/// the times are the host's. Events come from the thread that runs the step; take() between steps.
class StepRecorder final : public StepObserver {
 public:
  /// Attaches a recorder to every unit that `engine` has now; detach() or the engine's end ends it.
  static std::shared_ptr<StepRecorder> attach(const Engine& engine, size_t capacity = size_t{1} << 14) {
    auto recorder = std::make_shared<StepRecorder>(capacity);
    for (const auto& unit : engine.units()) unit->attach(recorder);
    return recorder;
  }
  void detach(const Engine& engine) const {
    for (const auto& unit : engine.units()) unit->detach(*this);
  }

  explicit StepRecorder(size_t capacity) : capacity_(std::max(capacity, size_t{1})) {}

  /// What has been recorded since the last call, oldest first.
  std::vector<StepEvent> take() {
    const auto events = std::exchange(events_, {});
    return {events.begin(), events.end()};
  }
  /// How many events were dropped because nobody took them in time.
  int64_t dropped() const { return dropped_; }

  void begin_step(ShardedUnit& unit, bool /*accumulating*/) override { add(StepEvent::Kind::begin_step, unit); }
  void before_forward(ShardedUnit& unit) override { add(StepEvent::Kind::before_forward, unit); }
  void before_gather(ShardedUnit& unit) override { add(StepEvent::Kind::before_gather, unit); }
  void after_gather(ShardedUnit& unit) override { add(StepEvent::Kind::after_gather, unit); }
  void after_forward(ShardedUnit& unit) override { add(StepEvent::Kind::after_forward, unit); }
  void before_backward(ShardedUnit& unit) override { add(StepEvent::Kind::before_backward, unit); }
  void before_reduce(FlatBuffer& buffer) override { add(StepEvent::Kind::before_reduce, buffer.unit()); }
  void after_free(ShardedUnit& unit) override { add(StepEvent::Kind::after_free, unit); }
  void end_backward(ShardedUnit& unit) override { add(StepEvent::Kind::end_backward, unit); }

 private:
  void add(StepEvent::Kind kind, const ShardedUnit& unit) {
    if (events_.size() == capacity_) {
      events_.pop_front();
      ++dropped_;
    }
    events_.push_back({kind, unit.index(), StepEvent::Clock::now()});
  }

  size_t capacity_;
  std::deque<StepEvent> events_;
  int64_t dropped_ = 0;
};

}  // namespace tesserae::shard
