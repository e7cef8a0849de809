#include "tesserae/dial/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "tesserae/base/error.h"

// After each step, in this order:
//  1. Steps are measured for the layout that they ran with; the first after a change is not (a run: the first few).
//  2. Memory: less free than the headroom is an emergency. At once, the fastest layout (by estimate) of those that need
//     less and are predicted to leave the headroom free; if there is none, the one that needs least. What ran out is
//     not used again until twice the headroom would stay free.
//  3. Settling: once the layout in use is measured, its median is the reference, and a look begins.
//  4. A look tries what is worth it, best estimate first: the next degrees up and down with P = G = O, and the two
//     other triples with the best estimates, unless those are worse than what is in use by more than `worth`. A layout
//     that is faster than the reference by more than `worth`, and more than the noise, takes its place, and its
//     neighbours are tried; then the look ends, and the best runs on. Each layout is tried once in a look.
//  5. A trial begins only if all of it (the steps, the change there and the change back) fits in what may be spent:
//     spent <= max(allowance, budget * steps). Otherwise it waits until enough steps have passed.
//  6. Holding: when the median of the window has left the reference by more than `drift` (and more than the noise), or
//     memory that ran out is free again, the reference is measured anew and a look begins.
namespace tesserae::dial {
namespace {

constexpr int lost_after = 4;    // observations after which a decision was not followed
constexpr double certain = 1.5;  // how many times the noise of single steps a difference of medians must be

double median(std::deque<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The standard deviation relative to the median, from the median deviation: one slow step does not count.
double relative_spread(const std::deque<double>& values) {
  const double center = median(values);
  std::deque<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - center));
  return 1.48 * median(deviations) / center;
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

Tuner::Tuner(const Facts& facts, const Links& links, TunerOptions options) : options_(options) {
  for (const mesh::Degrees& degrees : mesh::all_degrees(facts.ranks())) {
    all_.push_back(
        {.degrees = degrees, .memory = memory_of(facts, degrees), .moving = moving_seconds(facts, links, degrees)});
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
  return std::max<double>(options_.allowance, options_.budget * static_cast<double>(steps_));
}

std::optional<Decision> Tuner::observe(const Observation& seen) {
  take(seen);  // 1
  if (!arrived(seen)) return std::nullopt;
  if (place_ > 0 && seen.free < options_.headroom * place_) return relieve(seen);  // 2
  const auto measured = static_cast<int>(samples_.size());
  switch (phase_) {
    case Phase::settling:  // 3
      if (measured < options_.reference_steps) return std::nullopt;
      begin_look();
      return next();
    case Phase::trying:  // 4
      return measured < options_.trial_steps ? std::nullopt : judge();
    case Phase::holding:
      if (!look_due_ && !drifted() && !relaxed()) return std::nullopt;  // 6
      if (!look_due_) begin_look();
      return next();
  }
  return std::nullopt;
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
  }
  if (!incumbent_) incumbent_ = seen.degrees;
  if (trial_on_) {
    ++spent_;
    if (seen.seconds > 0) {
      const double change = seen.change_seconds / seen.seconds;
      spent_ += change;
      change_steps_ = std::max(change_steps_, change);
    }
    // The first step after the way back is the last of a trial.
    if (seen.degrees == *incumbent_ && !pending_) trial_on_ = false;
  }
  place_ = seen.place;
  const auto keep = [this](std::deque<double>& values, double value) {
    values.push_back(value);
    if (static_cast<int>(values.size()) > options_.window) values.pop_front();
  };
  keep(free_, seen.free);
  if (skip_ > 0) {
    --skip_;
  } else {
    keep(samples_, seen.seconds);
  }
}

/// False while a decision is on its way. Whatever else the degrees are afterwards is somebody else's choice, and ours
/// to measure.
bool Tuner::arrived(const Observation& seen) {
  if (pending_) {
    if (seen.degrees == *pending_) {
      pending_.reset();
      trial_on_ = trial_on_ && !(seen.degrees == *incumbent_);
      return true;
    }
    if (++waited_ < lost_after) return false;
    pending_.reset();
  }
  if (phase_ != Phase::trying && seen.degrees != *incumbent_) {
    incumbent_ = seen.degrees;
    phase_ = Phase::settling;
    trial_on_ = false;
  } else if (phase_ == Phase::trying && (tried_.empty() || seen.degrees != tried_.back())) {
    incumbent_ = seen.degrees;
    phase_ = Phase::settling;
    trial_on_ = false;
  }
  return true;
}

std::optional<Decision> Tuner::relieve(const Observation& seen) {
  const double now = layout_of(*current_).memory;
  const Layout *best = nullptr, *smallest = nullptr;
  for (const Layout& layout : all_) {
    if (layout.memory >= now) continue;
    if (smallest == nullptr || layout.memory < smallest->memory) smallest = &layout;
    if (seen.free + now - layout.memory < options_.headroom * place_) continue;
    if (best == nullptr || layout.moving < best->moving) best = &layout;
  }
  if (smallest == nullptr) return std::nullopt;  // nothing needs less: the job must live with what there is
  const mesh::Degrees to = (best != nullptr ? best : smallest)->degrees;
  too_big_ = current_;
  incumbent_ = to;
  trial_on_ = false;
  look_due_ = false;
  return turn(to, Phase::settling,
              cat("memory: ", percent(seen.free / place_), " free in step ", seen.step, ", and ",
                  percent(options_.headroom), " are to stay free"));
}

/// The end of a trial.
std::optional<Decision> Tuner::judge() {
  const double seconds = median(samples_);
  const double moved = layout_of(*current_).moving - layout_of(*incumbent_).moving;
  if (std::abs(moved) > 0.01 * reference_) exposed_ = std::clamp((seconds - reference_) / moved, 0.0, 1.0);
  const double gain = 1 - seconds / reference_;
  last_trial_ = cat(mesh::to_string(*current_), " takes ", milliseconds(seconds), " a step, ",
                    mesh::to_string(*incumbent_), " ", milliseconds(reference_));
  if (gain > std::max(options_.worth, certain * spread_)) {
    incumbent_ = current_;
    reference_ = seconds;
    trial_on_ = false;
    phase_ = Phase::holding;
    if (const auto more = next()) return more;
    return Decision{*current_, cat("kept: ", last_trial_)};
  }
  return next();
}

/// The next trial of this look; or the way back to the best.
std::optional<Decision> Tuner::next() {
  // A change there, one back; the step before each, since a decision may come a step late; the first one after each.
  const double cost = options_.trial_steps + 4 + 2 * change_steps_;
  if (spent_ + cost <= steps_allowed()) {
    // It may have waited long for this.
    if (*current_ == *incumbent_ && static_cast<int>(samples_.size()) >= options_.reference_steps) {
      reference_ = median(samples_);
      spread_ = relative_spread(samples_);
    }
    const std::vector<mesh::Degrees> candidates = worth_trying();
    look_due_ = !candidates.empty();
    if (look_due_) {
      const mesh::Degrees& to = candidates.front();
      tried_.push_back(to);
      trial_on_ = true;
      std::string why = cat("trying: estimated at ", milliseconds(predicted_seconds(to)), " a step, ",
                            mesh::to_string(*incumbent_), " takes ", milliseconds(reference_));
      if (*current_ != *incumbent_) why += "; " + last_trial_;
      return turn(to, Phase::trying, std::move(why));
    }
  }
  phase_ = Phase::holding;
  if (*current_ == *incumbent_) return std::nullopt;
  return turn(*incumbent_, Phase::holding, cat("back to what is fastest: ", last_trial_));
}

std::optional<Decision> Tuner::turn(const mesh::Degrees& degrees, Phase phase, std::string why) {
  phase_ = phase;
  pending_ = degrees;
  waited_ = 0;
  return Decision{degrees, std::move(why)};
}

void Tuner::begin_look() {
  phase_ = Phase::holding;
  reference_ = median(samples_);
  spread_ = relative_spread(samples_);
  tried_ = {*incumbent_};
  look_due_ = true;
  if (too_big_ && fits(*too_big_)) too_big_.reset();
}

bool Tuner::drifted() const {
  if (static_cast<int>(samples_.size()) < options_.window) return false;
  return std::abs(median(samples_) / reference_ - 1) > std::max(options_.drift, certain * spread_);
}

/// What ran out of memory would fit again, with as much to spare that it stays so.
bool Tuner::relaxed() const {
  return too_big_ && static_cast<int>(free_.size()) >= options_.window && fits(*too_big_);
}

std::vector<mesh::Degrees> Tuner::worth_trying() const {
  std::vector<mesh::Degrees> found;
  const auto add = [&](const mesh::Degrees& degrees) {
    if (!was_tried(degrees) && fits(degrees) && !contains(found, degrees)) found.push_back(degrees);
  };
  const int degree = incumbent_->optimizer;
  int below = 0, above = 0;  // next divisors of N
  std::vector<mesh::Degrees> others;
  for (const Layout& layout : all_) {
    const mesh::Degrees& degrees = layout.degrees;
    const int d = degrees.optimizer;
    if (degrees != mesh::Degrees{d, d, d}) {
      others.push_back(degrees);
    } else if (d < degree) {
      below = d;
    } else if (d > degree && above == 0) {
      above = d;
    }
  }
  if (below > 0) add({below, below, below});
  if (above > 0) add({above, above, above});
  add({degree, degree, degree});
  const auto faster = [this](const mesh::Degrees& a, const mesh::Degrees& b) {
    return predicted_seconds(a) < predicted_seconds(b);
  };
  std::ranges::stable_sort(others, faster);
  const double now = predicted_seconds(*incumbent_);
  for (size_t i = 0, taken = 0; i < others.size() && taken < 2; ++i) {
    if (predicted_seconds(others[i]) > now * (1 + options_.worth)) break;
    if (!fits(others[i])) continue;
    add(others[i]);
    ++taken;
  }
  std::ranges::stable_sort(found, faster);
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

bool Tuner::was_tried(const mesh::Degrees& degrees) const {
  return contains(tried_, degrees);
}

std::string Tuner::state() const {
  if (!current_) return "waiting for the first step";
  if (phase_ == Phase::settling) return cat("measuring ", mesh::to_string(*current_));
  if (phase_ == Phase::trying) return cat("trying ", mesh::to_string(tried_.back()));
  return cat("holding ", mesh::to_string(*incumbent_), ", ", milliseconds(reference_), " a step");
}

}  // namespace tesserae::dial
