#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/monitor/step_times.h"
#include "tesserae/monitor/unusual.h"

namespace tesserae::monitor {

/// A link that holds all ranks up.
struct SlowLink {
  Stage stage = Stage::gather;  ///< in which all wait longest
  double seconds = 0;           ///< of the last step: by how much it took longer than work and what is usual explain
  double share = 0;             ///< of that step
  int64_t since = 0;            ///< the step in which it was first so
};

/// Whether what carries the ranks' bytes has become slower, from what they did in the same step.
///
/// Who sends over a slow link and who receives both wait, so no rank can be named; but then a step takes longer than
/// any rank's work explains. What it can explain is the sum over stages of the longest work in each (the frontier of
/// maxima, arXiv 2606.06751): ranks may be slow by turns. The rest is compared with what it usually is under the same
/// degrees; the first steps under new ones teach it. In a step in which a rank works longer than the others, and in the
/// next one, nothing is said of links, nor learned. From a quarter of a step on a link is slow, else as Episode says.
/// What stays so for 64 steps is usual from then on.
class SlowLinks {
 public:
  struct Change {
    Episode::Turn turn;  ///< slow, over
    int64_t step;
    SlowLink link;
    std::string why;  ///< it is over; empty: it is not
  };

  /// The times of one step, by rank; steps ascend. `rank_is_slow`: SlowRanks::suspects().
  std::optional<Change> add(const std::vector<StepTimes>& ranks, bool rank_is_slow);

  std::optional<SlowLink> slow() const;

 private:
  Episode episode_;
  SlowLink is_;            // while the episode lasts
  mesh::Degrees degrees_;  // of what was learned
  Recent waited_;          // what no work explains, in seconds
  Recent step_seconds_;
  int64_t seen_ = 0, suspected_ = 0;  // steps under these degrees; those in a row
  bool rank_was_slow_ = false;
};

/// "steps take 0.31 s longer than any rank works, in reduce, 78 % of a step".
std::string describe(const SlowLink& link);

}  // namespace tesserae::monitor
