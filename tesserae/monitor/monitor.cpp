#include "tesserae/monitor/monitor.h"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/os/process.h"
#include "tesserae/os/seconds.h"
#include "tesserae/os/stacks.h"

// See [Note: rounds].
namespace tesserae::monitor {
namespace {

constexpr double memory_every = 2;
constexpr double longest_round = 2;  // who is not heard for 5 s is silent
// Seconds of a processor for each report, with two reports a second 0.1 % and 0.05 % of it. What takes more is done
// less often.
constexpr double for_report = 0.0005, for_memory = 0.00025;

double processor_time() {
  return os::seconds_of(os::thread_time());
}

std::string text_or_error(const std::function<std::string()>& text) {
  try {
    return text();
  } catch (const std::exception& error) {
    return cat("not to be had: ", error.what(), "\n");
  }
}

/// False where the system does not say.
bool complete_or_log(MemoryUse& use, c10::Device device, int ranks_of_host, std::optional<double> before) {
  try {
    complete(use, device, ranks_of_host, before);
    return true;
  } catch (const std::exception& error) {
    log(LogLevel::debug, cat("what this process holds is not known: ", error.what()));
    return false;
  }
}

}  // namespace

Monitor::Monitor(std::shared_ptr<comm::Fabric> fabric, MonitorOptions options)
    : fabric_(std::move(fabric)),
      options_(std::move(options)),
      timer_(std::make_shared<StepTimer>()),
      ranks_here_(static_cast<int>(fabric_->world().host_ranks(fabric_->rank()).size())),
      job_(options_.job),
      board_(leads() && fabric_->size() > 1 ? fabric_->size() : 1) {
  timer_->at_end_of_step([this] { after_step(); });
  wish_.generation = leads() ? os::now().time_since_epoch().count() : 0;
  // Whatever fails here: training does not need it.
  try {
    if (const auto store = fabric_->own_store("monitor/")) exchange_.emplace(store, fabric_->rank(), fabric_->size());
  } catch (const std::exception& error) {
    log(LogLevel::warning, cat("the monitor of this rank cannot tell others of it: ", error.what()));
  }
  if (leads() && !options_.folder.empty()) open_folder();
  pulse_ = std::make_unique<Pulse>([timer = timer_](double seconds) { timer->was_stopped(seconds); });
  thread_ = std::make_unique<std::jthread>([this](const std::stop_token& stop) { run(stop); });
}

Monitor::~Monitor() {
  if (made_.in_child()) {  // the threads and the socket are the parent's
    static_cast<void>(thread_.release());
    static_cast<void>(pulse_.release());
    static_cast<void>(requests_.release());
    return;
  }
  end("failed");
}

// The socket comes first: where another job has the folder, nothing is written.
void Monitor::open_folder() {
  try {
    os::files().make_directories(options_.folder);
    requests_ = std::make_unique<Requests>(options_.folder);
  } catch (const os::AddressInUse&) {
    log(LogLevel::warning, cat("another job writes to ", options_.folder.native(), ": nothing is written of this one"));
    return;
  } catch (const IoError& error) {
    log(LogLevel::warning, cat("nobody can ask this run for stacks or traces: ", error.what()));
  }
  try {
    files_.emplace(options_.folder);
  } catch (const IoError& error) {
    log(LogLevel::warning, cat("nothing is written of what the monitor sees: ", error.what()));
  }
}

void Monitor::watch(shard::Engine& engine) {
  timer_->attach(engine);
  {
    const std::scoped_lock lock(mutex_);
    std::erase_if(engines_, [&](const auto& known) { return known.expired() || *known.lock() == &engine; });
    engines_.push_back(engine.alive());
  }
  if (!program_bytes_) find_program_bytes();
}

void Monitor::find_program_bytes() {
  MemoryUse before = counted_memory();
  if (!complete_or_log(before, fabric_->device(), ranks_here_, std::nullopt)) return;
  const std::scoped_lock lock(mutex_);
  program_bytes_ = before.of(Holds::program);
}

void Monitor::set_job(const std::string& key, Json value) {
  const std::scoped_lock lock(mutex_);
  job_[key] = std::move(value);
}

void Monitor::tell(Event event) {
  const std::scoped_lock lock(mutex_);
  events_.push_back(std::move(event));
}

void Monitor::end(const std::string& how) {
  if (made_.in_child()) return;
  {
    const std::scoped_lock lock(mutex_);
    if (how_) return;
    how_ = how;
  }
  thread_->request_stop();
  woken_.notify_all();
  thread_->join();
  timer_->at_end_of_step({});
  for (const auto& known : engines_) {
    if (const auto engine = known.lock()) timer_->detach(**engine);
  }
}

MemoryUse Monitor::counted_memory() const {
  MemoryUse use;
  for (const auto& known : engines_) {
    if (const auto engine = known.lock()) add(use, **engine);
  }
  if (options_.optimizer_bytes) use.of(Holds::optimizer) = options_.optimizer_bytes();
  return use;
}

// On the training thread, between steps.
void Monitor::after_step() {
  {
    const std::scoped_lock lock(mutex_);
    if (!std::exchange(wants_memory_, false)) return;
  }
  const MemoryUse use = counted_memory();
  const std::scoped_lock lock(mutex_);
  memory_ = use;
}

double Monitor::pause_for(double cost, double allowed) const {
  return cost / allowed * os::seconds_of(options_.every);
}

void Monitor::run(const std::stop_token& stop) {
  c10::setThreadName("tsm-monitor");
  std::chrono::duration<double> wait = options_.every;
  for (bool last = false, told = false; !last;) {
    {
      std::unique_lock lock(wake_mutex_);
      woken_.wait_for(lock, stop, wait, [] { return false; });
    }
    last = stop.stop_requested();
    const double before = processor_time();
    spent_apart_ = 0;
    try {
      round(last);
    } catch (const std::exception& error) {
      if (!std::exchange(told, true))
        log(LogLevel::warning, cat("the monitor of this rank misses reports: ", error.what()));
    }
    const double cost = processor_time() - before - spent_apart_;
    wait = std::max<std::chrono::duration<double>>(
        options_.every, std::chrono::duration<double>(std::min(longest_round, pause_for(cost, for_report))));
  }
}

void Monitor::round(bool last) {
  if (exchange_ && !leads()) {
    if (const auto wish = exchange_->read_wish()) take_wish(*wish);
  }
  Report report = make_report();
  report.ended = last;
  if (exchange_ && !leads()) exchange_->write(report);
  std::vector<std::pair<int, Report>> others;
  if (exchange_ && leads()) others = exchange_->read_reports(wish_.generation);
  Json shown, timeline;
  std::vector<Event> events;
  {
    const std::scoped_lock lock(board_mutex_);
    board_.take(0, std::move(report));
    for (auto& [rank, one] : others) board_.take(rank, std::move(one));
    events = board_.look();
    if (!leads()) return;
    lead(events);
    shown = now();
    if (files_ && board_.timeline_step() != std::exchange(shown_timeline_, board_.timeline_step())) {
      timeline = board_.timeline(timer_->units());
    }
  }
  if (!files_) return;
  for (const Event& event : events) files_->add(event);
  files_->write_now(shown);
  if (!timeline.is_null()) files_->write_timeline(timeline);
}

Report Monitor::make_report() {
  pulse_->beat();  // step 3
  Report report{.number = ++number_, .now = timer_->now(), .steps = timer_->steps(wish_.known)};
  report.generation = wish_.generation;
  report.sent = timer_->sent();
  report.work = timer_->work();
  report.links = timer_->links();
  report.timeline = timer_->timeline(wish_.timeline_every);
  const double before = processor_time();
  measure_memory();
  report.memory = measured_;
  if (auto kept = timer_->take_kept()) {
    kept_ = std::move(*kept);
    kept_of_ = wish_.keep_first;
  }
  if (wish_.stacks != stacks_of_) {
    stacks_of_ = wish_.stacks;
    stacks_ = options_.more_stacks ? text_or_error(options_.more_stacks) : "";
    stacks_ += text_or_error([] { return os::to_text(os::thread_stacks()); });
  }
  spent_apart_ += processor_time() - before;
  if (wish_.waits) {
    report.kept = kept_;
    report.kept_of = kept_of_;
    report.stacks = stacks_;
    report.stacks_of = stacks_of_;
  }
  return report;
}

// Walking page tables takes milliseconds for each GB: its pause is its own.
void Monitor::measure_memory() {
  if (memory_measured_ && os::seconds_since(*memory_measured_) < memory_pause_) return;
  std::optional<MemoryUse> use;
  std::optional<double> program;
  {
    const std::scoped_lock lock(mutex_);
    use = std::exchange(memory_, std::nullopt);
    wants_memory_ = true;
    program = program_bytes_;
  }
  if (!use) return;  // no step has ended since
  const double before = processor_time();
  if (complete_or_log(*use, fabric_->device(), ranks_here_, program)) measured_ = *use;
  memory_measured_ = os::now();
  memory_pause_ = std::max(memory_every, pause_for(processor_time() - before, for_memory));
}

// Step 2. With the board.
void Monitor::lead(std::vector<Event>& events) {
  {
    const std::scoped_lock lock(mutex_);
    events.insert(events.begin(), events_.begin(), events_.end());
    events_.clear();
  }
  if (requests_ && std::ranges::find(events, "hang", &Event::kind) != events.end()) requests_->ask_for_stacks();
  Wish wish = wish_;
  wish.timeline_every = board_.timeline_every(os::seconds_of(options_.every));
  wish.known = board_.step();
  if (requests_ && files_) {
    requests_->look(board_, wish, *files_, timer_->units(), os::seconds_of(options_.every));
  }
  if (exchange_ && (number_ == 1 || to_bytes(wish) != to_bytes(wish_))) exchange_->write(wish);
  take_wish(wish);
}

void Monitor::take_wish(const Wish& wish) {
  if (wish.generation != wish_.generation) stacks_of_ = 0;  // they are counted anew
  if (wish.keep_first != wish_.keep_first) timer_->keep(wish.keep_first, wish.keep_last);
  wish_ = wish;
}

Json Monitor::now() const {
  Json all = {{"format", 1}, {"time", unix_time()}};
  const mesh::World& world = fabric_->world();
  {
    const std::scoped_lock lock(mutex_);
    all["state"] = how_ ? "ended" : "running";
    if (how_) all["how"] = *how_;
    all["process"] = {{"pid", os::process_id()}};
    all["job"] = job_;
  }
  Json hosts = Json::array();
  for (int rank = 0; rank < world.size(); ++rank) hosts.push_back(world.host(rank));
  all["job"]["ranks"] = world.size();
  all["job"]["hosts"] = std::move(hosts);
  all["job"]["device"] = c10::DeviceTypeName(fabric_->device().type(), /*lower_case=*/true);
  all.update(board_.now(timer_->units()));
  if (!leads()) all["ranks"][0]["rank"] = fabric_->rank();
  return all;
}

Json Monitor::status() const {
  const std::scoped_lock lock(board_mutex_);
  return now();
}

}  // namespace tesserae::monitor
