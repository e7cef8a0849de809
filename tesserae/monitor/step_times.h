#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tesserae/mesh/layout.h"
#include "tesserae/monitor/stage.h"

namespace tesserae::monitor {

/// What a rank did in a step, and for how long, by its own clock.
struct StepTimes {
  int64_t step = 0;    ///< from 1
  double total = 0;    ///< seconds
  PerStage seconds{};  ///< sums up to `total`
  /// Of a stage in which the rank works: for how long its thread had no processor, whatever the reason.
  PerStage off_processor{};
  /// For how long the whole process did not run while it was in that stage: stopped, frozen, swapped out.
  PerStage stopped{};
  /// Pages that the process had to read from a disk in this step, and waited for: major faults.
  uint64_t faults = 0;
  mesh::Degrees degrees = {};  ///< in which it was done
};

inline double sum_of(const PerStage& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

/// What a rank worked in each stage; in a stage of waiting it is what it could not do.
inline PerStage work_of(const StepTimes& times) {
  PerStage work{};
  for (size_t stage = 0; stage < stage_count; ++stage) {
    work[stage] = waits(static_cast<Stage>(stage)) ? times.stopped[stage] : times.seconds[stage];
  }
  return work;
}

/// Seconds of the rank that took longest.
inline double longest_of(const std::vector<StepTimes>& ranks) {
  return std::ranges::max(ranks, {}, &StepTimes::total).total;
}

/// One of the things that a rank did one after the other.
struct Span {
  uint8_t lane = 0;  ///< 0: the thread that trains; else 1 + comm::Traffic
  Stage stage = Stage::between;
  int16_t unit = -1;  ///< shard::ShardedUnit::index(); -1: none
  double begin = 0;   ///< seconds since the rank's step began
  double seconds = 0;
};

/// Verbs of groups, and a number for each.
constexpr std::array<std::string_view, 6> verb_names = {"all_gather", "reduce_scatter", "all_reduce",
                                                        "broadcast",  "exchange",       "barrier"};
using PerVerb = std::array<double, verb_names.size()>;

struct Timeline {
  int64_t step = 0;
  double seconds = 0;
  std::vector<Span> spans;
};

}  // namespace tesserae::monitor
