#include "tesserae/dial/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/cost/estimate.h"
#include "tesserae/cost/memory.h"

// One protocol, and the code in the order of its steps: parts of it in other files would be read beside this page.
//
// After each step, in this order:
//  1. Steps are measured for the layout that they ran with; the first after a change is not (a run: the first few).
//  2. Memory: less free than the headroom is an emergency. At once, the fastest layout (by estimate) of those that need
//     less and are predicted to leave the headroom free; if there is none, the one that needs least. What ran out is
//     not used again until twice the headroom would stay free.
//  3. Settling: once the layout in use is measured, its median is the reference, and a search is due.
//  4. A search (successive_halving.h) visits layouts. Its first round visits what is worth it, best estimate first:
//     what is estimated to be slower than the reference by at most `tolerance`, and the next degrees up and down with
//     P = G = O whatever is estimated; only what fits. What visits show corrects the estimates of the others. Its other
//     rounds visit the fastest again. The best takes the place of the layout in use if it is faster by more than
//     `worth`, and more than half of the noise of the difference (all of it, and more, if no layout was visited twice).
//  5. Steps of a search, changes (counted in steps) and the way to its best are spent: at most `budget` of all steps,
//     passed or planned, or the allowance. A search takes half of what is left, or as much as the allowance if that is
//     more; its first round three quarters of it. A visit begins only if it fits with the way back; a search, if a
//     visit does. Otherwise it waits until enough steps have passed.
//  6. Layouts are visited in one search only, until conditions change. What is left over, or became worth trying beside
//     a new best, makes the next search due.
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
constexpr double first_round = 0.75, of_the_noise = 0.5, of_what_is_left = 0.5;

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

bool contains(const std::vector<mesh::Degrees>& list, const mesh::Degrees& degrees) {
  return std::ranges::find(list, degrees) != list.end();
}

}  // namespace

Tuner::Tuner(const cost::Facts& facts, const cost::Links& links, TunerOptions options) : options_(options) {
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    all_.push_back({.degrees = degrees,
                    .memory = cost::memory_of(facts, degrees),
                    .moving = cost::moving_seconds(facts, links, degrees)});
  }
}

const Tuner::Layout& Tuner::layout_of(const mesh::Degrees& degrees) const {
  const auto found = std::ranges::find(all_, degrees, &Layout::degrees);
  if (found == all_.end()) {
    throw InvalidArgument("Tuner", cat(mesh::to_string(degrees), " are no degrees of this job's number of ranks"));
  }
  return *found;
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
      learn();
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
  if (search_) search_->add(seen.degrees, seen.seconds);
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
  if (!search_) trial_on_ = false;  // the first step after the way back is the last that is spent
  return true;
}

/// A search that is going on ends: it begins with these degrees, which nobody has measured.
void Tuner::expect_anew(const mesh::Degrees& degrees) {
  incumbent_ = expected_ = degrees;
  phase_ = Phase::settling;
  search_.reset();
  search_due_ = false;
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
  const std::optional<mesh::Degrees> to = next_visit();
  if (!to) return end_search();
  std::string why = search_->first_round() ? cat("trying: estimated at ", milliseconds(predicted_seconds(*to)))
                                           : cat("trying again: took ", milliseconds(search_->seconds(*to)));
  why += cat(" a step, ", mesh::to_string(*incumbent_), " takes ", milliseconds(reference_));
  if (*current_ != *incumbent_) {
    why += cat("; ", mesh::to_string(*current_), " took ", milliseconds(search_->seconds(*current_)));
  }
  return turn(*to, Phase::trying, std::move(why));
}

std::optional<mesh::Degrees> Tuner::next_visit() {
  // The step that passes while the decision travels, the change, the first step after it; and the measured ones.
  const double back = 2 + change_steps_;
  const double visit = back + options_.trial_steps;
  if (!search_ && !begin_search(visit + back)) return std::nullopt;
  if (search_->first_round() && spent_ + visit + back <= first_round_ends_) {
    const std::vector<mesh::Degrees> candidates = worth_trying();
    if (!candidates.empty()) {
      search_->visit(candidates.front());
      tried_.push_back(candidates.front());
      return candidates.front();
    }
  }
  if (spent_ + visit + back > search_ends_) return std::nullopt;
  return search_->again();
}

/// False if nothing is worth it, or there is no room yet for a visit of so many steps (5).
bool Tuner::begin_search(double visit) {
  const double left = steps_allowed() - spent_;
  if (visit > left) return false;
  refer();  // it may have waited long for this
  search_due_ = !worth_trying().empty();
  if (!search_due_) return false;
  const double share = std::max(of_what_is_left * left, std::min<double>(left, options_.allowance));
  search_ends_ = spent_ + std::max(share, visit);
  first_round_ends_ = spent_ + std::max(first_round * share, visit);
  search_.emplace(*incumbent_, all(samples_));
  trial_on_ = true;
  return true;
}

std::optional<Decision> Tuner::end_search() {
  phase_ = Phase::holding;
  if (!search_) return std::nullopt;
  const mesh::Degrees before = *incumbent_, best = search_->best();
  const double gain = 1 - search_->seconds(best) / search_->seconds(before);
  const double noise = std::hypot(search_->noise(best), search_->noise(before));
  const double enough = search_->visited_again() ? of_the_noise : certain;  // one visit is a few steps of one moment
  if (gain > std::max(options_.worth, enough * noise)) incumbent_ = best;
  reference_ = search_->seconds(*incumbent_);
  refer_again_ = true;
  const size_t others = search_->measured().size() - 1;
  std::string why = cat("fastest of ", others + 1, ": ", milliseconds(reference_), " a step");
  if (*incumbent_ != before) {
    why += cat(", ", mesh::to_string(before), " took ", milliseconds(search_->seconds(before)));
  }
  search_.reset();
  search_due_ = !worth_trying().empty();  // 6
  if (*current_ != *incumbent_) return turn(*incumbent_, Phase::holding, std::move(why));
  trial_on_ = false;
  return Decision{*current_, cat("kept: ", why)};
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
  tried_ = {*incumbent_};
  search_due_ = true;
  if (too_big_ && fits(*too_big_)) too_big_.reset();
}

/// The share that steps show of the estimated differences, by least squares over what was measured.
void Tuner::learn() {
  double shown = 0, squares = 0;
  for (const mesh::Degrees& degrees : search_->measured()) {
    const double moved = layout_of(degrees).moving - layout_of(*incumbent_).moving;
    shown += moved * (search_->seconds(degrees) - reference_);
    squares += moved * moved;
  }
  if (squares > std::pow(0.01 * reference_, 2)) exposed_ = std::clamp(shown / squares, 0.0, 1.0);
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

/// What was not tried, the best estimate first.
std::vector<mesh::Degrees> Tuner::worth_trying() const {
  const int degree = incumbent_->optimizer;
  int below = 0, above = 0;  // next divisors of N
  for (const Layout& layout : all_) {
    const int d = layout.degrees.optimizer;
    if (d < degree) below = std::max(below, d);
    if (d > degree && (above == 0 || d < above)) above = d;
  }
  const auto is_next = [&](const mesh::Degrees& degrees) {
    const int d = degrees.optimizer;
    return degrees == mesh::Degrees{d, d, d} && (d == below || d == above || d == degree);
  };
  const double longest = predicted_seconds(*incumbent_) * (1 + options_.tolerance);
  std::vector<mesh::Degrees> found;
  for (const Layout& layout : all_) {
    const mesh::Degrees& degrees = layout.degrees;
    if (contains(tried_, degrees) || was_refused(degrees) || !fits(degrees)) continue;
    if (is_next(degrees) || predicted_seconds(degrees) <= longest) found.push_back(degrees);
  }
  std::ranges::stable_sort(found, {}, [this](const mesh::Degrees& degrees) { return predicted_seconds(degrees); });
  return found;
}

/// What was measured of the incumbent, and the estimated difference as far as steps show it.
double Tuner::predicted_seconds(const mesh::Degrees& degrees) const {
  const double base = layout_of(*incumbent_).moving;
  const double seconds = reference_ > 0 ? reference_ : base;
  const double moved = exposed_ * (layout_of(degrees).moving - base);
  return std::max(0.05 * seconds, seconds + moved);
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
