#include "tesserae/monitor/slow_links.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/monitor/slow_ranks.h"

namespace tesserae::monitor {
namespace {

constexpr int64_t usual_after = 64;
constexpr double least_share = 0.25;  // verbs vary more than work: the last of their ranks decides

double unexplained(const std::vector<StepTimes>& ranks) {
  PerStage longest{};
  for (const StepTimes& times : ranks) {
    const PerStage work = work_of(times);
    for (size_t stage = 0; stage < stage_count; ++stage) longest[stage] = std::max(longest[stage], work[stage]);
  }
  return std::max(0.0, longest_of(ranks) - sum_of(longest));
}

/// In which even the rank that waits least in it waits longest.
Stage stage_of(const std::vector<StepTimes>& ranks) {
  const auto waited = [&ranks](Stage stage) {
    const auto at = static_cast<size_t>(stage);
    return std::ranges::min(ranks, {}, [at](const StepTimes& times) { return times.seconds[at]; }).seconds[at];
  };
  return std::ranges::max({Stage::gather, Stage::reduce, Stage::agree}, {}, waited);
}

}  // namespace

std::optional<SlowLinks::Change> SlowLinks::add(const std::vector<StepTimes>& ranks, bool rank_is_slow) {
  if (ranks.size() < 2) return std::nullopt;
  const bool others = ranks.front().degrees != degrees_;
  if (others || suspected_ > usual_after) {
    const bool was_slow = episode_.slow();
    const SlowLink was = is_;
    *this = {};
    degrees_ = ranks.front().degrees;
    const std::string why = others ? "the degrees have changed, and with them what travels"
                                   : cat("it has stayed so for ", usual_after, " steps and counts as usual now");
    if (was_slow) return Change{Episode::Turn::over, ranks.front().step, was, why};
  }
  // Steps of ranks end at moments of their own: for what one lost at the end of a step, others wait in the next.
  const bool was_slow = std::exchange(rank_was_slow_, rank_is_slow);
  if (++seen_ <= ignored_steps || rank_is_slow || was_slow) return std::nullopt;
  const double step_seconds = longest_of(ranks), waited = unexplained(ranks);
  std::optional<Change> change;
  if (step_seconds_.enough()) {
    const double beyond = waited - waited_.median();
    const Episode::Turn turn = episode_.add(ranks.front().step, beyond,
                                            {.step_seconds = std::min(step_seconds, step_seconds_.median()),
                                             .variation = variation({&waited_, 1}),
                                             .least_share = least_share});
    suspected_ = episode_.suspected() ? suspected_ + 1 : 0;
    if (suspected_ > 0) {
      is_ = {.stage = stage_of(ranks),
             .seconds = beyond,
             .share = step_seconds > 0 ? beyond / step_seconds : 0,
             .since = episode_.since()};
    }
    const bool over = turn == Episode::Turn::over;
    if (turn != Episode::Turn::none) {
      change = {turn, ranks.front().step, is_, over ? "bytes travel as fast as before again" : ""};
    }
  }
  if (suspected_ > 0) return change;  // it would count as what is usual
  step_seconds_.add(step_seconds);
  waited_.add(waited);
  return change;
}

std::optional<SlowLink> SlowLinks::slow() const {
  return episode_.slow() ? std::optional(is_) : std::nullopt;
}

std::string describe(const SlowLink& link) {
  return cat("steps take ", seconds_text(link.seconds), " s longer than any rank works, in ", name_of(link.stage), ", ",
             std::llround(100 * link.share), " % of a step");
}

}  // namespace tesserae::monitor
