#include "tesserae/monitor/step_timer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "tesserae/os/memory.h"
#include "tesserae/os/process.h"

// At each event the time since the one before goes to the stage that was, less what the thread waited meanwhile, which
// comm/ has counted: that goes to the stage of waiting. So nobody has to tell waiting from work.
namespace tesserae::monitor {
namespace {

constexpr size_t kept_timelines = 8;
constexpr size_t most_calls = 8192;     // of a lane in a step
constexpr double shortest_span = 2e-6;  // shorter ones could not be seen

double seconds_between(os::TimePoint begin, os::TimePoint end) {
  return std::chrono::duration<double>(end - begin).count();
}

double processor_seconds() {
  return std::chrono::duration<double>(os::thread_time()).count();
}

bool is_root(const shard::ShardedUnit& unit) {
  return unit.index() == 0;
}

/// Where a rank was stopped takes longest of all in its step.
void add_stop(StepTimes& step, double seconds) {
  if (seconds <= 0) return;
  const auto stage = std::ranges::max_element(step.seconds) - step.seconds.begin();
  step.stopped[static_cast<size_t>(stage)] += std::min(seconds, step.seconds[static_cast<size_t>(stage)]);
}

template <class Values>
void keep_newest(Values& values, size_t most) {
  if (values.size() > most) values.erase(values.begin());
}

}  // namespace

StepTimer::StepTimer() : since_(os::now()), step_began_(since_) {}

void StepTimer::attach(const shard::Engine& engine) {
  const auto self = shared_from_this();
  detach(engine);
  for (const auto& unit : engine.units()) unit->attach(self);
  const std::scoped_lock lock(mutex_);
  if (!first_unit_.contains(&engine)) {
    first_unit_[&engine] = static_cast<int>(units_.size());
    for (const auto& unit : engine.units()) units_.push_back(unit->name());
  }
  if (logs_.empty()) logs_ = {std::make_shared<comm::CallLog>(most_calls), std::make_shared<comm::CallLog>(most_calls)};
  engine.root().sharding().gather_lane.log_calls(logs_[0]);
  engine.root().sharding().reduce_lane.log_calls(logs_[1]);
}

void StepTimer::detach(const shard::Engine& engine) {
  for (const auto& unit : engine.units()) unit->detach(*this);
  engine.root().sharding().gather_lane.log_calls(nullptr);
  engine.root().sharding().reduce_lane.log_calls(nullptr);
}

void StepTimer::enter(Stage stage) {
  const std::scoped_lock lock(mutex_);
  mark(stage, -1);
}

void StepTimer::at_end_of_step(std::function<void()> call) {
  const std::scoped_lock lock(mutex_);
  at_end_ = std::move(call);
}

void StepTimer::end_step(int64_t step) {
  std::function<void()> at_end;
  {
    const std::scoped_lock lock(mutex_);
    told_ = true;
    close_step(step);
    at_end = at_end_;
  }
  if (at_end) at_end();
}

// Called with the mutex held, like all that follow.
void StepTimer::mark(Stage stage, int unit) {
  ++progress_;
  const os::TimePoint now = os::now();
  const double waited = comm::waited_by_this_thread();
  const bool same_thread = std::exchange(thread_, std::this_thread::get_id()) == std::this_thread::get_id();
  if (!same_thread) waiting_ = comm::waiting_of_this_thread();
  if (!std::exchange(begun_, true)) {  // what was before is no step
    since_ = step_began_ = now;
    comm::LinkLog::of_process().take();
    faults_ = os::major_faults();
    processor_ = processor_seconds();
  }
  const double elapsed = seconds_between(since_, now);
  const double wait = waits(stage_) ? elapsed : same_thread ? std::clamp(waited - waited_, 0.0, elapsed) : 0;
  const double work = elapsed - wait;
  const Stage waiting = waiting_in(stage_);
  open_.seconds[static_cast<size_t>(stage_)] += work;
  open_.seconds[static_cast<size_t>(waiting)] += wait;
  add_span(0, stage_, unit_, since_, work);
  add_span(0, waiting, unit_, now - std::chrono::nanoseconds(static_cast<int64_t>(wait * 1e9)), wait);
  worked_ += work;
  take_work();
  if (stage != stage_ || !same_thread) {
    const double processor = processor_seconds();
    if (same_thread) {
      open_.off_processor[static_cast<size_t>(stage_)] += std::max(0.0, worked_ - (processor - processor_));
    }
    processor_ = processor;
    worked_ = 0;
  }
  since_ = now;
  waited_ = waited;
  stage_ = stage;
  unit_ = unit;
}

void StepTimer::add_span(int lane, Stage stage, int unit, os::TimePoint begin, double seconds) {
  if (seconds < shortest_span || open_spans_.spans.size() >= most_spans) return;
  open_spans_.spans.push_back({.lane = static_cast<uint8_t>(lane),
                               .stage = stage,
                               .unit = static_cast<int16_t>(unit),
                               .begin = std::max(0.0, seconds_between(step_began_, begin)),
                               .seconds = seconds});
}

void StepTimer::close_step(int64_t step) {
  mark(Stage::between, -1);
  take_calls();
  take_links();
  open_.step = open_spans_.step = ended_ = step;
  open_.total = open_spans_.seconds = seconds_between(step_began_, since_);
  const uint64_t faults = os::major_faults();
  open_.faults = faults - std::exchange(faults_, faults);
  add_stop(open_, std::exchange(open_stop_, 0));
  steps_.push_back(std::exchange(open_, {}));
  keep_newest(steps_, kept_steps);
  if (step >= keep_first_ && step <= keep_last_) kept_.push_back(open_spans_);
  timelines_.push_back(std::exchange(open_spans_, {}));
  keep_newest(timelines_, kept_timelines);
  sent_ = std::exchange(open_sent_, {});
  work_ = std::exchange(open_work_, {});
  step_began_ = since_;
  reduced_.clear();
}

void StepTimer::take_work() {
  if (worker_ != std::this_thread::get_id()) return;
  const PerWork& all = work_of_this_thread();
  for (size_t i = 0; i < work_count; ++i) open_work_[i] += all[i] - seen_work_[i];
  seen_work_ = all;
}

void StepTimer::take_links() {
  links_.push_back(comm::LinkLog::of_process().take());
  if (links_.size() > speed_steps) links_.pop_front();
}

int StepTimer::number_of(const shard::ShardedUnit& unit) const {
  const auto engine = first_unit_.find(&unit.engine());
  return engine == first_unit_.end() ? unit.index() : engine->second + unit.index();
}

int StepTimer::unit_named(const std::string& name) const {
  const auto found = std::ranges::find(units_, name);
  return found == units_.end() ? -1 : static_cast<int>(found - units_.begin());
}

void StepTimer::take_calls() {
  for (size_t lane = 0; lane < logs_.size(); ++lane) {
    const auto [calls, sent] = logs_[lane]->take();
    for (const auto& [name, bytes] : sent) {
      const auto verb = std::ranges::find(verb_names, name) - verb_names.begin();
      if (verb < static_cast<std::ptrdiff_t>(verb_names.size())) {
        open_sent_[static_cast<size_t>(verb)] += static_cast<double>(bytes);
      }
    }
    for (const comm::Call& call : calls) {
      if (call.end < step_began_) continue;
      add_span(static_cast<int>(lane) + 1, lane == 0 ? Stage::gather : Stage::reduce, unit_named(call.unit), call.begin,
               seconds_between(call.begin, call.end));
    }
  }
}

void StepTimer::was_stopped(double seconds) {
  const std::scoped_lock lock(mutex_);
  if (!begun_) return;
  // By now the thread may be some steps on.
  double back = seconds_between(step_began_, os::now()) - seconds / 2;  // from the middle of the stop to a step's begin
  if (back >= 0) {
    open_stop_ += seconds;  // whether it worked or waited is known at the next event
    return;
  }
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    back += step->total;
    if (back >= 0) return add_stop(*step, seconds);
  }
}

Now StepTimer::now() const {
  const std::scoped_lock lock(mutex_);
  return {.step = ended_ + 1,
          .stage = waiting_ && *waiting_ ? waiting_in(stage_) : stage_,
          .unit = unit_,
          .seconds = seconds_between(since_, os::now()),
          .progress = progress_};
}

std::vector<StepTimes> StepTimer::steps(int64_t after) const {
  const std::scoped_lock lock(mutex_);
  return {std::ranges::upper_bound(steps_, after, {}, &StepTimes::step), steps_.end()};
}

std::optional<Timeline> StepTimer::timeline(int64_t every) const {
  const std::scoped_lock lock(mutex_);
  for (auto found = timelines_.rbegin(); found != timelines_.rend(); ++found) {
    if (found->step % std::max<int64_t>(every, 1) == 0) return *found;
  }
  return std::nullopt;
}

void StepTimer::keep(int64_t first, int64_t last) {
  const std::scoped_lock lock(mutex_);
  keep_first_ = first;
  keep_last_ = last;
  kept_.clear();
}

std::optional<std::vector<Timeline>> StepTimer::take_kept() {
  const std::scoped_lock lock(mutex_);
  if (keep_last_ < 0 || ended_ < keep_last_) return std::nullopt;
  keep_last_ = -1;
  return std::exchange(kept_, {});
}

std::vector<std::string> StepTimer::units() const {
  const std::scoped_lock lock(mutex_);
  return units_;
}

PerVerb StepTimer::sent() const {
  const std::scoped_lock lock(mutex_);
  return sent_;
}

PerWork StepTimer::work() const {
  const std::scoped_lock lock(mutex_);
  return work_;
}

std::vector<comm::LinkUse> StepTimer::links() const {
  const std::scoped_lock lock(mutex_);
  if (links_.empty()) return {};
  std::vector<comm::LinkUse> uses = links_.back();
  for (comm::LinkUse& use : uses) {
    for (const auto& step : links_) {
      const auto same = std::ranges::find_if(step, [&](const comm::LinkUse& each) { return each.same_hop(use); });
      if (same != step.end()) use.quickest = std::max(use.quickest, same->quickest);
    }
  }
  return uses;
}

void StepTimer::go_back(int64_t step) {
  const std::scoped_lock lock(mutex_);
  ended_ = step;
  std::erase_if(steps_, [step](const StepTimes& times) { return times.step > step; });
  std::erase_if(timelines_, [step](const Timeline& timeline) { return timeline.step > step; });
}

void StepTimer::next_forward_has(int64_t tokens) {
  const std::scoped_lock lock(mutex_);
  next_tokens_ = tokens;
}

// The events of all engines. Of those that every unit of an engine is told of, the root's counts.

void StepTimer::begin_step(shard::ShardedUnit& unit, bool /*accumulating*/) {
  if (!is_root(unit)) return;
  std::unique_lock lock(mutex_);
  evaluating_ = !at::GradMode::is_enabled();
  take_work();
  if (evaluating_) return;
  if (!told_ && reduced_.contains(&unit.engine())) {
    close_step(ended_ + 1);
    if (const auto at_end = at_end_) {
      lock.unlock();
      at_end();
      lock.lock();
    }
  }
  open_.degrees = unit.sharding().layout.degrees();
  phase_ = Stage::forward;
  forwards_.clear();
  around_ = stage_ == Stage::optimizer ? Stage::optimizer : Stage::between;
  mark(phase_, number_of(unit));
  if (worker_ != std::this_thread::get_id()) {
    worker_ = std::this_thread::get_id();
    seen_work_ = work_of_this_thread();
  }
  open_work_[static_cast<size_t>(Work::tokens)] += static_cast<uint64_t>(std::exchange(next_tokens_, 0));
}

void StepTimer::before_forward(shard::ShardedUnit& unit) {
  const std::scoped_lock lock(mutex_);
  ++progress_;
  if (evaluating_) return;
  if (phase_ == Stage::forward) forwards_.push_back(number_of(unit));  // in a backward its end is not told of
  mark(phase_, number_of(unit));
}

void StepTimer::before_gather(shard::ShardedUnit& unit) {
  const std::scoped_lock lock(mutex_);
  if (!evaluating_) mark(phase_, number_of(unit));
}

void StepTimer::after_gather(shard::ShardedUnit& unit) {
  before_gather(unit);
}

void StepTimer::after_forward(shard::ShardedUnit& unit) {
  const std::scoped_lock lock(mutex_);
  // What an evaluation has done is no part of a step.
  if (evaluating_ && is_root(unit) && worker_ == std::this_thread::get_id()) seen_work_ = work_of_this_thread();
  if (evaluating_ || phase_ != Stage::forward) return;
  if (!forwards_.empty()) forwards_.pop_back();
  mark(phase_, forwards_.empty() ? -1 : forwards_.back());
}

void StepTimer::begin_backward(shard::ShardedUnit& unit, bool /*boundary*/) {
  if (!is_root(unit)) return;
  const std::scoped_lock lock(mutex_);
  evaluating_ = false;
  phase_ = Stage::backward;
  mark(phase_, -1);
}

void StepTimer::before_backward(shard::ShardedUnit& unit) {
  const std::scoped_lock lock(mutex_);
  mark(phase_, number_of(unit));
}

void StepTimer::end_backward(shard::ShardedUnit& unit) {
  if (!is_root(unit)) return;
  const std::scoped_lock lock(mutex_);
  phase_ = Stage::forward;
  forwards_.clear();
  mark(around_, -1);
}

void StepTimer::after_backward(shard::ShardedUnit& unit) {
  if (!is_root(unit)) return;
  const std::scoped_lock lock(mutex_);
  reduced_.insert(&unit.engine());
}

}  // namespace tesserae::monitor
