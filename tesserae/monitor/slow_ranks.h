#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/monitor/step_times.h"
#include "tesserae/monitor/unusual.h"

namespace tesserae::monitor {

/// A rank for which the others wait.
struct SlowRank {
  int rank = 0;
  Stage stage = Stage::between;  ///< in which it loses most
  double seconds = 0;            ///< of the last step: what it worked longer than the ranks did at the median
  double share = 0;              ///< of that step of the job
  int64_t since = 0;             ///< the step in which it was first so
  std::string why;               ///< "its process did not run for 0.52 s"; empty: nothing is known
};

/// Who holds a job up, from what ranks did in the same step; their clocks need not agree.
///
/// Ranks wait for each other in every step, so all of them take about as long: what tells them apart is how long each
/// *works*. The work of a rank beyond the median of the others is what they wait for, and the stage where it is
/// farthest beyond theirs is the cause. (The frontier of arXiv 2606.06751 takes maxima of sums up to each stage; ours
/// are sums over stages since a step has a point where all ranks meet, its last reduction.)
///
/// From when on that makes a rank slow, Episode says; what varies is the median of all ranks' deviations. For how long
/// a rank could not run (stopped, without a processor) and for how long it read data is judged beside that, each by
/// what such times vary: where steps vary much, those may not. The first steps of a job teach it, and name nobody; each
/// step teaches what is usual of the ranks that are not suspected in it, if these are most.
class SlowRanks {
 public:
  struct Change {
    Episode::Turn turn;  ///< slow, over
    int64_t step;
    SlowRank rank;
  };

  static constexpr size_t part_count = 2;  ///< of a rank's work that are judged by themselves

  /// The times of one step, by rank; steps ascend. What has changed by it.
  std::vector<Change> add(const std::vector<StepTimes>& ranks);

  /// In the last step a rank worked longer than the others, named or not.
  bool suspects() const;
  /// Who is slow now, the most expensive first.
  std::vector<SlowRank> slow() const;

 private:
  void learn(double step_seconds, const std::vector<double>& beyond,
             const std::array<std::vector<double>, part_count>& parts);

  struct Rank {
    Episode episode;
    SlowRank is;  // while the episode lasts
  };

  std::vector<Rank> ranks_;
  std::vector<Recent> beyond_;                         // by rank: work beyond that of the others
  std::array<std::vector<Recent>, part_count> parts_;  // by rank: of it what is judged by itself, beyond the others'
  Recent step_seconds_;
  int64_t seen_ = 0;
};

/// "rank 3 takes 0.12 s longer than the others in backward, 31 % of a step: its process did not run for 0.1 s".
std::string describe(const SlowRank& rank);

/// 0.0123 as "0.012", 1.234 as "1.23".
std::string seconds_text(double seconds);

}  // namespace tesserae::monitor
