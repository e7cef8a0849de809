#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "tesserae/monitor/step_times.h"

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
/// *works*. The work of a rank beyond the median is what the others wait for, and the stage where it is farthest beyond
/// theirs is the cause. (The frontier of arXiv 2606.06751 takes maxima of sums up to each stage; ours are sums over
/// stages since a step has a point where all ranks meet, its last reduction.)
///
/// A rank is slow if that is more than 10 ms, a tenth of a step and five times by what it varies from step to step (the
/// median of all ranks' deviations): in two steps in a row, or in one by half a step and eight times that variation. It
/// is no longer when it was not for three steps; meanwhile it is named again if it becomes four times as slow. The
/// first steps of a job teach what varies, and name nobody.
class SlowRanks {
 public:
  struct Change {
    enum class Kind { slow, over };
    Kind kind;
    int64_t step;
    SlowRank rank;
  };

  /// The times of one step, by rank; steps ascend. What has changed by it.
  std::vector<Change> add(const std::vector<StepTimes>& ranks);

  /// Who is slow now, the most expensive first.
  std::vector<SlowRank> slow() const;

 private:
  struct State {
    int64_t suspected = 0;  // steps in a row
    int64_t quiet = 0;      // steps in a row
    double told = 0;        // its seconds when it was named last; 0: not yet
    SlowRank is;
  };
  double variation() const;

  std::map<int, State> states_;             // of ranks that are or were suspected
  std::vector<std::deque<double>> beyond_;  // by rank: work beyond the median, of the newest steps
  std::deque<double> step_seconds_;
  int64_t seen_ = 0;
};

/// "rank 3 takes 0.12 s longer than the others in backward, 31 % of a step: its process did not run for 0.1 s".
std::string describe(const SlowRank& rank);

}  // namespace tesserae::monitor
