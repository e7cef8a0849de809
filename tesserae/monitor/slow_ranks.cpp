#include "tesserae/monitor/slow_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

constexpr int64_t ignored_steps = 3;  // buffers and caches are made
constexpr size_t taught_by = 8, remembered = 32;
constexpr double least_seconds = 0.01;  // a scheduler's tick is nobody's fault
constexpr double least_share = 0.1, least_variations = 5;
constexpr double share_at_once = 0.5, variations_at_once = 8;
constexpr double worse = 4;
constexpr int64_t steps_until_slow = 2, steps_until_over = 3;

/// Of two the lower one: somebody is at it.
double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median(const std::deque<double>& values) {
  return lower_median({values.begin(), values.end()});
}

void remember(std::deque<double>& values, double value) {
  if (values.size() == remembered) values.pop_front();
  values.push_back(value);
}

/// Of each value: by how much it is beyond the median of the others.
std::vector<double> beyond_others(const std::vector<double>& values) {
  std::vector<double> sorted = values;
  std::ranges::sort(sorted);
  const size_t middle = (values.size() - 2) / 2;
  std::vector<double> beyond;
  for (const double value : values) {
    const bool below = value <= sorted[middle];  // taken out, it moves those above it down
    beyond.push_back(value - sorted[below ? middle + 1 : middle]);
  }
  return beyond;
}

/// Work of a rank, by stage; in a stage of waiting it is what it could not do.
PerStage work_of(const StepTimes& times) {
  PerStage work{};
  for (size_t stage = 0; stage < stage_count; ++stage) {
    work[stage] = waits(static_cast<Stage>(stage)) ? times.stopped[stage] : times.seconds[stage];
  }
  return work;
}

double sum_of(const PerStage& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

std::string number(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 0.0995 ? "%.3f" : "%.2f", seconds);
  return text;
}

std::string reason(const StepTimes& times, double off_usually, size_t stage, double beyond) {
  const double stopped = sum_of(times.stopped);
  if (stopped > beyond / 3) return cat("its process did not run for ", number(stopped), " s");
  const auto which = static_cast<Stage>(stage);
  const double off = times.off_processor[stage] - off_usually;
  if ((which == Stage::forward || which == Stage::backward || which == Stage::optimizer) && off > beyond / 2) {
    return cat("it had no processor for ", number(times.off_processor[stage]), " s of it");
  }
  return {};
}

/// The stage in which `rank` is farthest beyond the median.
size_t worst_stage(const std::vector<PerStage>& work, size_t rank) {
  size_t worst = 0;
  double farthest = 0;
  for (size_t stage = 0; stage < stage_count; ++stage) {
    std::vector<double> of_all;
    for (const PerStage& one : work) of_all.push_back(one[stage]);
    const double by = work[rank][stage] - lower_median(of_all);
    if (by <= farthest) continue;
    farthest = by;
    worst = stage;
  }
  return worst;
}

SlowRank judge(const std::vector<StepTimes>& ranks, const std::vector<PerStage>& work, size_t rank, double beyond,
               double step_seconds) {
  const size_t worst = worst_stage(work, rank);
  std::vector<double> off;
  for (const StepTimes& times : ranks) off.push_back(times.off_processor[worst]);
  return {.rank = static_cast<int>(rank),
          .stage = static_cast<Stage>(worst),
          .seconds = beyond,
          .share = step_seconds > 0 ? beyond / step_seconds : 0,
          .since = ranks.front().step,
          .why = reason(ranks[rank], lower_median(off), worst, beyond)};
}

}  // namespace

double SlowRanks::variation() const {
  std::vector<double> deviations;
  for (const auto& of_rank : beyond_) {
    const double middle = median(of_rank);
    for (const double value : of_rank) deviations.push_back(std::abs(value - middle));
  }
  return 1.4826 * lower_median(std::move(deviations));
}

std::vector<SlowRanks::Change> SlowRanks::add(const std::vector<StepTimes>& ranks) {
  std::vector<Change> changes;
  if (ranks.size() < 2 || ++seen_ <= ignored_steps) return changes;
  beyond_.resize(ranks.size());
  std::vector<PerStage> work;
  std::vector<double> sums;
  double step_seconds = 0;
  for (const StepTimes& times : ranks) {
    work.push_back(work_of(times));
    sums.push_back(sum_of(work.back()));
    step_seconds = std::max(step_seconds, times.total);
  }
  const std::vector<double> all_beyond = beyond_others(sums);
  const bool taught = step_seconds_.size() >= taught_by;
  const double usual_step = taught ? std::min(step_seconds, median(step_seconds_)) : step_seconds;
  const double varies = variation();
  bool quiet = true;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const double beyond = all_beyond[rank];
    const auto exceeds = [&](double share, double times) {
      return taught && beyond > std::max({least_seconds, share * usual_step, times * varies});
    };
    const auto known = states_.find(static_cast<int>(rank));
    if (!exceeds(least_share, least_variations)) {
      if (known == states_.end()) continue;
      State& state = known->second;
      state.suspected = 0;
      if (state.told > 0 && ++state.quiet < steps_until_over) continue;
      if (state.told > 0) changes.push_back({Change::Kind::over, ranks.front().step, state.is});
      states_.erase(known);
      continue;
    }
    quiet = false;
    State& state = states_[static_cast<int>(rank)];
    const int64_t since = state.suspected > 0 || state.told > 0 ? state.is.since : ranks.front().step;
    state.is = judge(ranks, work, rank, beyond, step_seconds);
    state.is.since = since;
    state.quiet = 0;
    ++state.suspected;
    const bool at_once = exceeds(share_at_once, variations_at_once);
    if (state.told > 0 ? !at_once || beyond < worse * state.told : !at_once && state.suspected < steps_until_slow) {
      continue;
    }
    state.told = beyond;
    changes.push_back({Change::Kind::slow, ranks.front().step, state.is});
  }
  if (!quiet) return changes;  // it would count as what is usual
  remember(step_seconds_, step_seconds);
  for (size_t rank = 0; rank < ranks.size(); ++rank) remember(beyond_[rank], all_beyond[rank]);
  return changes;
}

std::vector<SlowRank> SlowRanks::slow() const {
  std::vector<SlowRank> all;
  for (const auto& [rank, state] : states_) {
    if (state.told > 0) all.push_back(state.is);
  }
  std::ranges::sort(all, std::greater<>(), &SlowRank::seconds);
  return all;
}

std::string describe(const SlowRank& rank) {
  std::string text = cat("rank ", rank.rank, " takes ", number(rank.seconds), " s longer than the others in ",
                         name_of(rank.stage), ", ", std::llround(100 * rank.share), " % of a step");
  if (!rank.why.empty()) text += ": " + rank.why;
  return text;
}

}  // namespace tesserae::monitor
