#include "tesserae/dial/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/median.h"
#include "tesserae/cost/memory.h"
#include "tesserae/cost/step_time.h"

// One protocol, and the code in the order of its steps: parts of it in other files would be read beside this page.
//
// After each step, in this order:
//  1. Steps are measured for the layout that they ran with; the first after a change is not (a run: the first few).
//  2. Memory: less free than the headroom is an emergency. At once, the fastest layout (by estimate) of those that need
//     less and are predicted to leave the headroom free; if there is none, the one that needs least. What ran out is
//     not used again until twice the headroom would stay free.
//  3. Settling: once the layout in use is measured, its median is the reference, and a search is due.
//  4. A search visits layouts, one after the other: next always the one of which a visit is expected to gain most, by
//     what the prediction and the noise of steps may be wrong (belief.h); it may have been visited before. Only what
//     fits is. The search ends when no visit is expected to gain enough: a tenth of `worth` at first, a third of it
//     after 33 steps of a search, and so on. So what is predicted to be clearly worse is never visited, and what cannot
//     be told apart is left as it is. The layout that is believed to be fastest, of those that were visited, takes the
//     place of the one in use if it is by more than `worth`, and by more than a fifth of what that difference may be
//     wrong.
//  5. Steps of a search, changes (counted in steps) and the way to its best are spent: at most `budget` of all steps,
//     passed or planned, or the allowance. A search takes 18 % of what is left, or as much as the allowance if that
//     is more. A visit begins only if it fits with the way back, and in all with a change that takes longer than those
//     before; a search, if a visit does, and the next one under the same conditions if steps that have passed pay for
//     it. Otherwise it waits.
//  6. What was seen counts until conditions change, at the speed that the machine has by then. What there was no room
//     to visit makes the next search due.
//  7. Holding: when the median of the window has left the reference by more than `drift` (and more than the noise), or
//     memory that ran out is free again, conditions have changed: the reference is measured anew, and all is worth
//     trying that was.
//  8. What was decided and never came was refused. It is not asked for again, by 2 or 4, until conditions have changed
//     (7) or half the headroom more would stay free with it than then.
namespace tesserae::dial {
namespace {

constexpr int lost_after = 4;     // observations after which a decision was not followed
constexpr double eased_by = 0.5;  // how much of the headroom more must be free to ask again for what was refused
constexpr double certain = 1.5;   // how many times the noise of single steps a drift must be
constexpr double of_the_error = 0.2, of_what_is_left = 0.18;
constexpr double least_worth = 0.1, full_worth_after = 100;  // of `worth`; steps of a search

std::vector<double> all(const std::deque<double>& values) {
  return {values.begin(), values.end()};
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ms", seconds * 1e3);
  return text;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f %%", share * 100);
  return text;
}

/// What the plan says that a step of each layout takes beside computing, stage by stage, of the machine whose links
/// were measured.
std::vector<std::vector<double>> predicted_stages(const cost::Facts& facts, const cost::Links& links) {
  cost::Machine machine;
  machine.links = links;
  std::vector<std::vector<double>> all;
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    const cost::MovingTime time = cost::moving_time(facts, machine, degrees);
    all.push_back({time.gather, time.reduce, time.refresh, time.optimizer});
  }
  return all;
}

}  // namespace

Tuner::Tuner(const cost::Facts& facts, const cost::Links& links, TunerOptions options)
    : options_(options), stages_(predicted_stages(facts, links)), belief_(stages_) {
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    const std::vector<double>& stages = stages_[all_.size()];
    all_.push_back({.degrees = degrees,
                    .memory = cost::memory_of(facts, degrees),
                    .moving = std::accumulate(stages.begin(), stages.end(), 0.0)});
  }
}

size_t Tuner::index_of(const mesh::Degrees& degrees) const {
  const auto found = std::ranges::find(all_, degrees, &Layout::degrees);
  if (found == all_.end()) {
    throw InvalidArgument("Tuner", cat(mesh::to_string(degrees), " are no degrees of this job's number of ranks"));
  }
  return static_cast<size_t>(found - all_.begin());
}

double Tuner::steps_allowed() const {
  const auto steps = static_cast<double>(std::max(steps_, options_.planned_steps));
  return std::max<double>(options_.allowance, options_.budget * steps);
}

std::optional<Decision> Tuner::observe(const Observation& seen) {
  take(seen);  // 1
  if (!arrived(seen)) return std::nullopt;
  const bool again = eased();                                                      // 8
  if (place_ > 0 && seen.free < options_.headroom * place_) return relieve(seen);  // 2
  switch (phase_) {
    case Phase::settling:  // 3
      if (measured() < options_.reference_steps) return std::nullopt;
      search_anew();
      break;
    case Phase::trying:  // 4
      if (measured() < options_.trial_steps) return std::nullopt;
      belief_.saw(index_of(*current_), all(samples_));
      break;
    case Phase::holding:
      if (refer_again_ && measured() >= options_.window) refer();
      search_due_ = search_due_ || again;
      if (drifted() || relaxed()) {  // 7
        refused_.clear();
        search_anew();
      }
      if (!search_due_ || measured() < options_.reference_steps) return std::nullopt;
      break;
  }
  return next();
}

void Tuner::take(const Observation& seen) {
  if (!first_step_) first_step_ = seen.step;
  steps_ = seen.step - *first_step_ + 1;
  const bool changed = current_ != seen.degrees;
  if (changed) {
    skip_ = current_ ? 1 : options_.settle_steps;
    samples_.clear();
    free_.clear();
    current_ = seen.degrees;
    std::erase_if(refused_, [&](const Refused& refused) { return refused.degrees == seen.degrees; });
  }
  if (!incumbent_) incumbent_ = expected_ = seen.degrees;
  if (trial_on_) {
    ++spent_;
    if (seen.seconds > 0) {
      const double change = seen.change_seconds / seen.seconds;
      spent_ += change;
      change_steps_ = std::max(change_steps_, change);
    }
  }
  place_ = seen.place;
  const auto keep = [this](std::deque<double>& values, double value) {
    values.push_back(value);
    if (static_cast<int>(values.size()) > options_.window) values.pop_front();
  };
  keep(free_, seen.free);
  if (skip_ > 0) {
    --skip_;
    return;
  }
  keep(samples_, seen.seconds);
}

/// False while a decision is on its way. Whatever else the degrees are afterwards is somebody else's choice, and ours
/// to measure.
bool Tuner::arrived(const Observation& seen) {
  if (pending_ && seen.degrees != *expected_) {
    if (++waited_ < lost_after) return false;
    refused_.push_back({.degrees = *expected_, .free = predicted_free(*expected_)});
  }
  pending_ = false;
  if (seen.degrees != *expected_) expect_anew(seen.degrees);
  if (!searching_) trial_on_ = false;  // the first step after the way back is the last that is spent
  return true;
}

/// A search that is going on ends: it begins with these degrees, which nobody has measured.
void Tuner::expect_anew(const mesh::Degrees& degrees) {
  incumbent_ = expected_ = degrees;
  phase_ = Phase::settling;
  searching_ = search_due_ = false;
}

std::optional<Decision> Tuner::relieve(const Observation& seen) {
  const double now = layout_of(*current_).memory;
  const Layout *best = nullptr, *smallest = nullptr;
  for (const Layout& layout : all_) {
    if (layout.memory >= now || was_refused(layout.degrees)) continue;
    if (smallest == nullptr || layout.memory < smallest->memory) smallest = &layout;
    if (seen.free + now - layout.memory < options_.headroom * place_) continue;
    if (best == nullptr || layout.moving < best->moving) best = &layout;
  }
  if (smallest == nullptr) return std::nullopt;  // nothing less is to be had: the job must live with what there is
  too_big_ = current_;
  trial_on_ = false;
  expect_anew((best != nullptr ? best : smallest)->degrees);
  return turn(*incumbent_, Phase::settling,
              cat("memory: ", percent(seen.free / place_), " free in step ", seen.step, ", and ",
                  percent(options_.headroom), " are to stay free"));
}

/// The next visit of a search; or its end.
std::optional<Decision> Tuner::next() {
  const std::optional<size_t> to = next_visit();
  if (!to) return end_search();
  std::string why = belief_.visited(*to)
                        ? cat("trying again: took ", milliseconds(belief_.measured(*to)), ", believed ")
                        : "trying: expected ";
  why += cat(milliseconds(belief_.seconds(*to)), " a step, ", mesh::to_string(*incumbent_), " takes ",
             milliseconds(reference_));
  if (*current_ != *incumbent_) {
    why += cat("; ", mesh::to_string(*current_), " took ", milliseconds(belief_.measured(index_of(*current_))));
  }
  return turn(all_[*to].degrees, Phase::trying, std::move(why));
}

std::optional<size_t> Tuner::next_visit() {
  // The step that passes while the decision travels, the change, the first step after it; and the measured ones.
  const double back = 2 + change_steps_;
  const double visit = back + options_.trial_steps;
  if (!searching_ && !begin_search(visit + back)) return std::nullopt;
  if (spent_ + visit + back > search_ends_) return std::nullopt;
  // What may be spent in all is a promise, and a change may take longer than those before.
  const double longer = change_steps_ > 0 ? 1 + change_steps_ : 0;
  if (spent_ + visit + back + longer > steps_allowed()) return std::nullopt;
  return worth_a_visit();
}

/// False if there is no room yet for a visit of so many steps (5).
bool Tuner::begin_search(double visit) {
  const size_t in_use = index_of(*incumbent_);
  // What the first search had no room for waits until steps that have passed, not planned ones, pay for it.
  const double passed = std::max<double>(options_.allowance, options_.budget * static_cast<double>(steps_));
  const double left = (belief_.visited(in_use) ? std::min(passed, steps_allowed()) : steps_allowed()) - spent_;
  if (visit > left) return false;
  refer();  // it may have waited long for this
  if (belief_.visited(in_use)) belief_.rescale(reference_ / belief_.measured(in_use));
  belief_.saw(in_use, all(samples_));
  const double share = std::max(of_what_is_left * left, std::min<double>(left, options_.allowance));
  search_began_ = spent_;
  search_ends_ = spent_ + std::max(share, visit);
  searching_ = trial_on_ = true;
  search_due_ = false;
  return true;
}

/// Of all that fit, the one of which a visit is expected to gain most, if that is enough (4).
std::optional<size_t> Tuner::worth_a_visit() const {
  const size_t best = believed_best(), in_use = index_of(*current_);
  const double enough = std::max(least_worth, (spent_ - search_began_) / full_worth_after);
  double most = enough * options_.worth * belief_.seconds(best);
  std::optional<size_t> found;
  for (size_t other = 0; other < all_.size(); ++other) {
    if (other == best || !may_run(other)) continue;
    // A visit of either tells of their difference.
    for (const size_t layout : {other, best}) {
      if (layout == in_use || (layout == best && !belief_.visited(other))) continue;
      const double gain = belief_.expected_gain(layout, other, best, options_.trial_steps);
      if (gain <= most) continue;
      most = gain;
      found = layout;
    }
  }
  return found;
}

bool Tuner::may_run(size_t layout) const {
  return fits(all_[layout].degrees) && !was_refused(all_[layout].degrees);
}

/// Of those that were visited and may run; the one in use may.
size_t Tuner::believed_best() const {
  size_t best = index_of(*incumbent_);
  for (size_t i = 0; i < all_.size(); ++i) {
    if (belief_.visited(i) && may_run(i) && belief_.seconds(i) < belief_.seconds(best)) best = i;
  }
  return best;
}

std::optional<Decision> Tuner::end_search() {
  phase_ = Phase::holding;
  if (!searching_) return std::nullopt;
  searching_ = false;
  search_due_ = worth_a_visit().has_value();  // 6
  const mesh::Degrees before = *incumbent_;
  const size_t in_use = index_of(before), best = believed_best();
  const double gain = belief_.seconds(in_use) - belief_.seconds(best);
  if (gain > std::max(options_.worth * belief_.seconds(in_use), of_the_error * belief_.error(best, in_use))) {
    incumbent_ = all_[best].degrees;
  }
  reference_ = belief_.measured(index_of(*incumbent_));
  refer_again_ = true;
  std::string why = compared();
  if (*current_ != *incumbent_) return turn(*incumbent_, Phase::holding, std::move(why));
  trial_on_ = false;
  return Decision{*current_, cat("kept: ", why)};
}

/// For people: what was predicted beside what was measured, and of the rest what could come next.
std::string Tuner::compared() const {
  std::vector<size_t> visited;
  std::optional<size_t> next;
  size_t others = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (belief_.visited(i)) {
      visited.push_back(i);
    } else if (may_run(i)) {
      ++others;
      if (!next || belief_.seconds(i) < belief_.seconds(*next)) next = i;
    }
  }
  std::ranges::stable_sort(visited, {}, [this](size_t i) { return belief_.seconds(i); });
  std::string text = "measured (predicted):";
  for (const size_t i : visited) {
    text += cat(i == visited.front() ? " " : ", ", mesh::to_string(all_[i].degrees), " ",
                milliseconds(belief_.measured(i)), " (", milliseconds(belief_.predicted(i)), ")");
  }
  if (next) {
    text += cat("; ", others, " not tried, the best of them, ", mesh::to_string(all_[*next].degrees), ", believed ",
                milliseconds(belief_.seconds(*next)));
  }
  if (belief_.surprise() > 1)
    text += cat("; predictions were off by ", belief_.surprise(), " times their stated error");
  return text;
}

std::optional<Decision> Tuner::turn(const mesh::Degrees& degrees, Phase phase, std::string why) {
  phase_ = phase;
  expected_ = degrees;
  pending_ = true;
  waited_ = 0;
  return Decision{degrees, std::move(why)};
}

/// The layout in use is the incumbent: its steps are what others are compared with.
void Tuner::refer() {
  reference_ = median(all(samples_));
  spread_ = relative_spread(all(samples_));
  refer_again_ = false;
}

void Tuner::search_anew() {
  phase_ = Phase::holding;
  refer();
  belief_ = Belief(stages_);
  search_due_ = true;
  if (too_big_ && fits(*too_big_)) too_big_.reset();
}

bool Tuner::drifted() const {
  if (refer_again_ || measured() < options_.window) return false;
  return std::abs(median(all(samples_)) / reference_ - 1) > std::max(options_.drift, certain * spread_);
}

/// What ran out of memory would fit again, with as much to spare that it stays so.
bool Tuner::relaxed() const {
  return too_big_ && static_cast<int>(free_.size()) >= options_.window && fits(*too_big_);
}

/// There is more memory for something that was refused, which is forgotten.
bool Tuner::eased() {
  if (place_ <= 0 || static_cast<int>(free_.size()) < options_.window) return false;
  return std::erase_if(refused_, [this](const Refused& refused) {
           return predicted_free(refused.degrees) >= refused.free + eased_by * options_.headroom * place_;
         }) > 0;
}

double Tuner::predicted_free(const mesh::Degrees& degrees) const {
  const double least = free_.empty() ? 0 : *std::ranges::min_element(free_);
  return least + layout_of(*current_).memory - layout_of(degrees).memory;
}

bool Tuner::fits(const mesh::Degrees& degrees) const {
  if (place_ <= 0) return true;
  const bool ran_out = too_big_ && layout_of(degrees).memory >= layout_of(*too_big_).memory;
  return predicted_free(degrees) >= (ran_out ? 2 : 1) * options_.headroom * place_;
}

bool Tuner::was_refused(const mesh::Degrees& degrees) const {
  return std::ranges::find(refused_, degrees, &Refused::degrees) != refused_.end();
}

std::string Tuner::state() const {
  if (!current_) return "waiting for the first step";
  if (phase_ == Phase::settling) return cat("measuring ", mesh::to_string(*current_));
  if (phase_ == Phase::trying) return cat("trying ", mesh::to_string(*expected_));
  return cat("holding ", mesh::to_string(*incumbent_), ", ", milliseconds(reference_), " a step");
}

}  // namespace tesserae::dial
