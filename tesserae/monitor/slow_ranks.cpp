#include "tesserae/monitor/slow_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "tesserae/base/error.h"

namespace tesserae::monitor {
namespace {

constexpr uint64_t many_faults = 10;  // once a job has begun there are none
// A machine that takes a processor away in every fifth step may do so in the next two.
constexpr double share_of_usual = 0.8;

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

/// What ranks usually have of something, by the median.
double usually(const std::vector<StepTimes>& ranks, const std::function<double(const StepTimes&)>& value) {
  std::vector<double> values;
  for (const StepTimes& times : ranks) values.push_back(value(times));
  return lower_median(std::move(values));
}

/// For how long a rank could not run, as far as is known: its process was stopped, or its thread had no processor where
/// it computes.
double held_of(const StepTimes& times) {
  double off = 0;
  for (const Stage stage : {Stage::forward, Stage::backward, Stage::optimizer}) {
    off += times.off_processor[static_cast<size_t>(stage)];
  }
  return std::max(off, sum_of(times.stopped));
}

/// What is judged by itself, since it varies less than computing does: in SlowRanks::parts_, in this order.
std::array<double, SlowRanks::part_count> parts_of(const StepTimes& times) {
  return {held_of(times), times.seconds[static_cast<size_t>(Stage::data)]};
}

// Who waits for a disk has no processor either, so that comes last.
std::string reason(const std::vector<StepTimes>& ranks, size_t rank, size_t stage, double beyond) {
  const StepTimes& times = ranks[rank];
  const double stopped = sum_of(times.stopped);
  if (stopped > beyond / 3) return cat("its process did not run for ", seconds_text(stopped), " s");
  const double faults = usually(ranks, [](const StepTimes& one) { return static_cast<double>(one.faults); });
  if (static_cast<double>(times.faults) > 2 * faults + many_faults) {
    return cat("it waited for ", times.faults, " pages from a disk: memory is short, or a mapped file is new");
  }
  const auto which = static_cast<Stage>(stage);
  const double off =
      times.off_processor[stage] - usually(ranks, [stage](const StepTimes& one) { return one.off_processor[stage]; });
  if ((which == Stage::forward || which == Stage::backward || which == Stage::optimizer) && off > beyond / 2) {
    return cat("it had no processor for ", seconds_text(times.off_processor[stage]), " s of it");
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

}  // namespace

std::vector<SlowRanks::Change> SlowRanks::add(const std::vector<StepTimes>& ranks) {
  std::vector<Change> changes;
  if (ranks.size() < 2 || ++seen_ <= ignored_steps) return changes;
  const int64_t step = ranks.front().step;
  beyond_.resize(ranks.size());
  ranks_.resize(ranks.size());
  std::vector<PerStage> work;
  std::vector<double> sums;
  std::array<std::vector<double>, part_count> all_parts;
  for (const StepTimes& times : ranks) {
    work.push_back(work_of(times));
    sums.push_back(sum_of(work.back()));
    const auto parts = parts_of(times);
    for (size_t part = 0; part < part_count; ++part) all_parts[part].push_back(parts[part]);
  }
  const double step_seconds = longest_of(ranks);
  const std::vector<double> all_beyond = beyond_others(sums);
  for (size_t part = 0; part < part_count; ++part) {
    all_parts[part] = beyond_others(all_parts[part]);
    parts_[part].resize(ranks.size());
  }
  if (step_seconds_.enough()) {
    std::array<Episode::Part, part_count> parts;
    for (size_t part = 0; part < part_count; ++part) parts[part].variation = deviation(parts_[part], share_of_usual);
    const Episode::Usual usual{.step_seconds = std::min(step_seconds, step_seconds_.median()),
                               .variation = variation(beyond_),
                               .parts = parts};
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      auto& [episode, is] = ranks_[rank];
      for (size_t part = 0; part < part_count; ++part) parts[part].beyond = all_parts[part][rank];
      const Episode::Turn turn = episode.add(step, all_beyond[rank], usual);
      if (episode.suspected()) {
        const size_t worst = worst_stage(work, rank);
        is = {.rank = static_cast<int>(rank),
              .stage = static_cast<Stage>(worst),
              .seconds = all_beyond[rank],
              .share = step_seconds > 0 ? all_beyond[rank] / step_seconds : 0,
              .since = episode.since(),
              .why = reason(ranks, rank, worst, all_beyond[rank])};
      }
      if (turn != Episode::Turn::none) changes.push_back({turn, step, is});
    }
  }
  learn(step_seconds, all_beyond, all_parts);
  return changes;
}

// What is suspected would count as usual; and where half of the ranks are, so would what others have less than they.
// Others teach on: where all steps become longer, somebody is always beyond what was usual of those before.
void SlowRanks::learn(double step_seconds, const std::vector<double>& beyond,
                      const std::array<std::vector<double>, part_count>& parts) {
  double lost = 0;
  size_t suspected = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].episode.suspected()) continue;
    ++suspected;
    lost = std::max(lost, beyond[rank]);
  }
  step_seconds_.add(step_seconds - lost);
  if (2 * suspected >= ranks_.size()) return;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].episode.suspected()) continue;
    beyond_[rank].add(beyond[rank]);
    for (size_t part = 0; part < part_count; ++part) parts_[part][rank].add(parts[part][rank]);
  }
}

bool SlowRanks::suspects() const {
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.episode.suspected(); });
}

std::vector<SlowRank> SlowRanks::slow() const {
  std::vector<SlowRank> all;
  for (const Rank& rank : ranks_) {
    if (rank.episode.slow()) all.push_back(rank.is);
  }
  std::ranges::sort(all, std::greater<>(), &SlowRank::seconds);
  return all;
}

std::string describe(const SlowRank& rank) {
  std::string text = cat("rank ", rank.rank, " takes ", seconds_text(rank.seconds), " s longer than the others in ",
                         name_of(rank.stage), ", ", std::llround(100 * rank.share), " % of a step");
  if (!rank.why.empty()) text += ": " + rank.why;
  return text;
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 0.0995 ? "%.3f" : "%.2f", seconds);
  return text;
}

}  // namespace tesserae::monitor
