#include "tesserae/monitor/board.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/os/seconds.h"

namespace tesserae::monitor {
namespace {

constexpr size_t kept_steps = 32;
constexpr size_t most_open = 512;  // of a step that a rank never tells of (it was too quick), nothing is made
constexpr size_t timelines_of_rank = 4;
constexpr size_t most_hops = 32;
constexpr size_t most_shown_spans = 1 << 18;  // of all ranks: 10 MB of text
constexpr double silence = 5, shortest_hang = 10, hang_steps = 20;

double rounded(double seconds) {
  return std::round(seconds * 1e6) / 1e6;
}

Json row_of(const PerStage& seconds) {
  Json row = Json::array();
  for (const double value : seconds) row.push_back(rounded(value));
  return row;
}

const comm::LinkUse* find_hop(const std::vector<comm::LinkUse>& uses, const comm::LinkUse& hop) {
  const auto found = std::ranges::find_if(uses, [&hop](const comm::LinkUse& use) { return use.same_hop(hop); });
  return found == uses.end() ? nullptr : &*found;
}

/// Seconds that all of the `most` longest spans exceed; 0 where there are no more than that.
double exceeded_by_longest(const std::vector<Span>& spans, size_t most) {
  if (spans.size() <= most) return 0;
  std::vector<double> seconds;
  for (const Span& span : spans) seconds.push_back(span.seconds);
  const auto next = seconds.begin() + static_cast<std::ptrdiff_t>(most);
  std::ranges::nth_element(seconds, next, std::greater<>());
  return *next;
}

/// The row that has least, but something; null unless two have.
Json least_in_column(const Json& table, size_t column) {
  Json least;
  size_t known = 0;
  for (size_t row = 0; row < table.size(); ++row) {
    const Json& value = table[row][column];
    if (value == 0) continue;
    ++known;
    if (least.is_null() || value < table[least.get<size_t>()][column]) least = row;
  }
  return known > 1 ? least : Json();
}

}  // namespace

Board::Board(int ranks, double rest) : ranks_(static_cast<size_t>(ranks)), rest_(rest), progressed_(os::now()) {
  for (Rank& rank : ranks_) rank.heard = progressed_;
}

void Board::take(int number, Report report) {
  Rank& rank = ranks_.at(static_cast<size_t>(number));
  if (rank.report && rank.report->number == report.number) return;
  rank.heard = os::now();
  if (report.now.step <= step_) go_back((report.steps.empty() ? report.now.step : report.steps.front().step) - 1);
  for (const StepTimes& times : report.steps) {
    if (times.step > step_) open_[times.step].emplace(number, times);
  }
  if (report.timeline) {
    rank.timelines[report.timeline->step] = std::move(*report.timeline);
    if (rank.timelines.size() > timelines_of_rank) rank.timelines.erase(rank.timelines.begin());
  }
  if (report.kept_of > 0) {
    rank.kept_of = report.kept_of;
    rank.kept = std::move(report.kept);
  }
  if (report.stacks_of == 0 && rank.report) {
    report.stacks_of = rank.report->stacks_of;
    report.stacks = std::move(rank.report->stacks);
  }
  rank.report = std::move(report);
}

/// A rank is at a step that all had ended: the run has gone back behind it, and other steps have those numbers now.
void Board::go_back(int64_t step) {
  step_ = step;
  open_.clear();
  std::erase_if(complete_, [step](const std::vector<StepTimes>& all) { return all.front().step > step; });
  for (Rank& rank : ranks_) std::erase_if(rank.timelines, [step](const auto& each) { return each.first > step; });
}

std::vector<Event> Board::look() {
  std::vector<Event> events;
  read_steps(events);
  find_silence(events);
  find_hang(events);
  return events;
}

void Board::read_steps(std::vector<Event>& events) {
  std::vector<int64_t> done;
  for (auto& [step, told] : open_) {
    if (told.size() < ranks_.size()) continue;
    std::vector<StepTimes> all;
    for (auto& [rank, times] : told) all.push_back(times);
    for (const SlowRanks::Change& change : slow_.add(all)) {
      const bool slow = change.turn == Episode::Turn::slow;
      events.push_back(
          {.step = change.step,
           .kind = slow ? "slow" : "slow_over",
           .rank = change.rank.rank,
           .text = slow ? describe(change.rank) : cat("rank ", change.rank.rank, " is as fast as the others again")});
    }
    if (const auto change = slow_links_.add(all, slow_.suspects())) {
      const bool slow = change->turn == Episode::Turn::slow;
      events.push_back({.step = change->step,
                        .kind = slow ? "slow_link" : "slow_link_over",
                        .rank = -1,
                        .text = slow ? cat(describe(change->link), ": ", longest_hop()) : change->why});
    }
    step_ = step;
    step_seconds_ = longest_of(all);
    complete_.push_back(std::move(all));
    if (complete_.size() > kept_steps) complete_.pop_front();
    done.push_back(step);
  }
  for (const int64_t step : done) open_.erase(step);
  std::erase_if(open_, [this](const auto& entry) { return entry.first < step_; });
  while (open_.size() > most_open) open_.erase(open_.begin());
}

void Board::find_silence(std::vector<Event>& events) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    const bool silent = rank.report && !rank.report->ended && os::seconds_since(rank.heard) > silence;
    if (silent == rank.silent) continue;
    rank.silent = silent;
    const int number = static_cast<int>(i);
    events.push_back({.step = step_,
                      .kind = silent ? "silent" : "heard",
                      .rank = number,
                      .text = silent ? cat("rank ", number, " has been silent for ", static_cast<int>(silence),
                                           " s: it is stopped, or its host cannot be reached")
                                     : cat("rank ", number, " is heard again")});
  }
}

void Board::find_hang(std::vector<Event>& events) {
  int64_t progress = 0;
  bool waiting = false, within_step = false, ended = false, begun = true;
  for (const Rank& rank : ranks_) {
    begun = begun && rank.report && rank.report->now.progress > 0;  // else it may be loading
    if (!rank.report) continue;
    const Now& now = rank.report->now;
    progress += now.progress;
    ended = ended || rank.report->ended;
    waiting = waiting || rank.silent || waits(now.stage);
    within_step = within_step || (now.stage != Stage::between && now.stage != Stage::agree);
  }
  if (progress != std::exchange(progress_, progress)) progressed_ = os::now();
  const double seconds = os::seconds_since(progressed_);
  const double patience = within_step && step_ > 0 ? std::max(shortest_hang, hang_steps * step_seconds_) : rest_;
  const bool hangs = (step_ > 0 || begun) && waiting && !ended && seconds > patience;
  if (hangs && !hangs_) {
    events.push_back({.step = next_step(), .kind = "hang", .rank = -1, .text = describe_hang(seconds)});
  }
  hangs_ = hangs;
}

/// The one that not all ranks have ended. A resumed run has not told of those before it.
int64_t Board::next_step() const {
  int64_t next = INT64_MAX;
  for (const Rank& rank : ranks_) {
    if (rank.report) next = std::min(next, rank.report->now.step);
  }
  return next;
}

// Who works or is silent is what the others wait for.
std::string Board::describe_hang(double seconds) const {
  std::string text = cat("nothing has happened in step ", next_step(), " for ", std::lround(seconds), " s:");
  size_t waiting = 0;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    if (!rank.report) continue;
    if (waits(rank.report->now.stage) && !rank.silent) {
      ++waiting;
      continue;
    }
    text += cat(" rank ", i, rank.silent ? " is silent, last in " : " is in ", name_of(rank.report->now.stage),
                " of step ", rank.report->now.step, ";");
  }
  return text + cat(" ", waiting, waiting == 1 ? " rank waits" : " ranks wait");
}

Json Board::now(const std::vector<std::string>& units) const {
  Json all = {{"stages", stage_names}};
  for (size_t stage = 0; stage < stage_count; ++stage) {
    if (waits(static_cast<Stage>(stage))) all["waits"].push_back(stage_names[stage]);
  }
  all["step"] = step_;
  all["step_seconds"] = rounded(step_seconds_);
  Json seconds = Json::array(), usual = Json::array(), slow = Json::array(), ranks = Json::array();
  for (size_t rank = 0; rank < ranks_.size() && !complete_.empty(); ++rank) {
    seconds.push_back(row_of(complete_.back()[rank].seconds));
    PerStage medians{};
    for (size_t stage = 0; stage < stage_count; ++stage) {
      std::vector<double> values;
      for (const auto& step : complete_) values.push_back(step[rank].seconds[stage]);
      const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
      std::nth_element(values.begin(), middle, values.end());
      medians[stage] = *middle;
    }
    usual.push_back(row_of(medians));
  }
  all["seconds"] = std::move(seconds);
  all["usual"] = std::move(usual);
  for (const SlowRank& rank : slow_.slow()) {
    slow.push_back({{"rank", rank.rank},
                    {"stage", name_of(rank.stage)},
                    {"seconds", rounded(rank.seconds)},
                    {"share", rounded(rank.share)},
                    {"since", rank.since},
                    {"why", rank.why}});
  }
  all["slow"] = std::move(slow);
  all["slow_link"] = nullptr;
  if (const auto link = slow_links_.slow()) {
    all["slow_link"] = {{"stage", name_of(link->stage)},
                        {"seconds", rounded(link->seconds)},
                        {"share", rounded(link->share)},
                        {"since", link->since},
                        {"why", longest_hop()}};
  }
  all["hangs"] = hangs_;
  Json memory = {{"categories", holds_names}}, traffic = {{"verbs", verb_names}};
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    static const Report none;
    const Report& report = rank.report ? *rank.report : none;
    const double age = os::seconds_since(rank.heard);
    const auto unit = static_cast<size_t>(report.now.unit);
    ranks.push_back({{"rank", i},
                     {"step", report.now.step},
                     {"stage", rank.report ? Json(name_of(report.now.stage)) : Json()},
                     {"unit", report.now.unit >= 0 && unit < units.size() ? Json(units[unit]) : Json()},
                     {"for", rounded(report.now.seconds)},
                     {"age", rounded(age)}});
    Json& bytes = memory["bytes"].emplace_back(Json::array());
    for (const double value : report.memory.bytes) bytes.push_back(static_cast<int64_t>(value));
    memory["peak"].push_back(static_cast<int64_t>(report.memory.peak));
    memory["limit"].push_back(report.memory.limit ? Json(static_cast<int64_t>(*report.memory.limit)) : Json());
    Json& sent = traffic["bytes"].emplace_back(Json::array());
    for (const double value : report.sent) sent.push_back(static_cast<int64_t>(value));
  }
  all["ranks"] = std::move(ranks);
  all["memory"] = std::move(memory);
  all["traffic"] = std::move(traffic);
  all["load"] = load();
  all["links"] = links();
  return all;
}

// Who has most of what, and how much that is over the mean: the others wait for it.
Json Board::load() const {
  Json all = {{"kinds", work_names}, {"amounts", Json::array()}, {"most", Json::array()}, {"imbalance", Json::array()}};
  PerWork sums{}, most{};
  std::array<size_t, work_count> who{};
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const PerWork work = ranks_[rank].report ? ranks_[rank].report->work : PerWork();
    all["amounts"].push_back(work);
    for (size_t kind = 0; kind < work_count; ++kind) {
      sums[kind] += work[kind];
      if (work[kind] > most[kind]) who[kind] = rank;
      most[kind] = std::max(most[kind], work[kind]);
    }
  }
  for (size_t kind = 0; kind < work_count; ++kind) {
    const bool known = sums[kind] > 0;
    const double mean = static_cast<double>(sums[kind]) / static_cast<double>(ranks_.size());
    all["most"].push_back(known ? Json(who[kind]) : Json());
    all["imbalance"].push_back(known ? Json(rounded(static_cast<double>(most[kind]) / mean)) : Json());
  }
  return all;
}

const std::vector<comm::LinkUse>& Board::links_of(const Rank& rank) {
  static const std::vector<comm::LinkUse> nothing;
  return rank.report ? rank.report->links : nothing;
}

// A verb takes as long as the last of its ranks; the quickest of many was held up least, so it tells links apart.
Json Board::links() const {
  std::vector<comm::LinkUse> hops;
  for (const Rank& rank : ranks_) {
    for (const comm::LinkUse& use : links_of(rank)) {
      if (hops.size() < most_hops && find_hop(hops, use) == nullptr) hops.push_back(use);
    }
  }
  Json calls = Json::array(), bytes = Json::array(), seconds = Json::array(), speed = Json::array();
  for (const Rank& rank : ranks_) {
    for (Json* table : {&calls, &bytes, &seconds, &speed}) table->push_back(Json::array());
    for (const comm::LinkUse& hop : hops) {
      const comm::LinkUse* const found = find_hop(links_of(rank), hop);
      const comm::LinkUse use = found != nullptr ? *found : comm::LinkUse();
      calls.back().push_back(use.calls);
      bytes.back().push_back(use.bytes);
      seconds.back().push_back(rounded(use.seconds));
      speed.back().push_back(std::llround(use.quickest));
    }
  }
  Json names = Json::array(), slowest = Json::array();
  for (size_t hop = 0; hop < hops.size(); ++hop) {
    const comm::LinkUse& is = hops[hop];
    names.push_back({{"link", is.link}, {"lane", is.lane}, {"verb", is.verb}, {"ranks", is.ranks}});
    slowest.push_back(least_in_column(speed, hop));
  }
  return {{"hops", std::move(names)},      {"calls", std::move(calls)}, {"bytes", std::move(bytes)},
          {"seconds", std::move(seconds)}, {"speed", std::move(speed)}, {"slowest", std::move(slowest)}};
}

// In the newest step that ranks have told of.
std::string Board::longest_hop() const {
  comm::LinkUse longest;
  for (const Rank& rank : ranks_) {
    for (const comm::LinkUse& use : links_of(rank)) {
      if (use.seconds > longest.seconds) longest = use;
    }
  }
  if (longest.seconds == 0) return "what carries the bytes is slow";
  const double megabytes = static_cast<double>(longest.bytes) / longest.seconds / 1e6;
  return cat(longest.verb, " of ", longest.ranks, " ranks over ", longest.link, " takes longest, at ",
             std::llround(megabytes), " MB/s");
}

int64_t Board::timeline_step() const {
  int64_t step = 0;
  for (const auto& [candidate, timeline] : ranks_.front().timelines) {
    const auto has = [at = candidate](const Rank& rank) { return rank.timelines.contains(at); };
    if (std::ranges::all_of(ranks_, has)) step = candidate;
  }
  return step;
}

Json Board::timeline(const std::vector<std::string>& units) const {
  const int64_t step = timeline_step();
  if (step == 0) return {};
  Json all = {{"step", step}, {"lanes", {"compute", "gather", "reduce"}}, {"stages", stage_names}, {"units", units}};
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Timeline& timeline = ranks_[i].timelines.at(step);
    const double exceeded = exceeded_by_longest(timeline.spans, most_shown_spans / ranks_.size());
    Json events = Json::array();
    for (const Span& span : timeline.spans) {
      if (span.seconds <= exceeded) continue;
      events.push_back({span.lane, static_cast<int>(span.stage), span.unit, std::llround(span.begin * 1e6),
                        std::llround(span.seconds * 1e6)});
    }
    all["ranks"].push_back({{"rank", i}, {"seconds", rounded(timeline.seconds)}, {"events", std::move(events)}});
  }
  return all;
}

int64_t Board::timeline_every(double report_seconds) const {
  int64_t every = 1;
  while (step_seconds_ > 0 && static_cast<double>(every) * step_seconds_ < 2 * report_seconds) every *= 2;
  return every;
}

std::vector<std::vector<Timeline>> Board::take_kept(int64_t first) {
  if (!std::ranges::all_of(ranks_, [first](const Rank& rank) { return rank.kept_of == first; })) return {};
  std::vector<std::vector<Timeline>> all;
  for (Rank& rank : ranks_) all.push_back(std::exchange(rank.kept, {}));
  return all;
}

size_t Board::spans_of_step() const {
  size_t most = 0;
  for (const Rank& rank : ranks_) {
    if (!rank.timelines.empty()) most = std::max(most, rank.timelines.rbegin()->second.spans.size());
  }
  return most;
}

void Board::forget_stacks() {
  for (Rank& rank : ranks_) {
    if (!rank.report) continue;
    rank.report->stacks.clear();
    rank.report->stacks_of = 0;
  }
}

std::vector<std::string> Board::stacks(int64_t number) const {
  std::vector<std::string> all;
  for (const Rank& rank : ranks_) {
    all.push_back(rank.report && rank.report->stacks_of == number ? rank.report->stacks : "");
  }
  return all;
}

}  // namespace tesserae::monitor
