#include "tesserae/monitor/unusual.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tesserae::monitor {
namespace {

constexpr double least_seconds = 0.01;  // a scheduler's tick is nobody's fault
constexpr double least_variations = 4;
constexpr double share_at_once = 0.5, variations_at_once = 8;
constexpr double part_at_once = 0.3;  // of a step: what it is known to have gone to is no noise of a clock
constexpr double part_variations_at_once = 5;
constexpr double worse = 4;
// Less than that for two steps in a row may be what else runs on a machine.
constexpr double share_soon = 0.3;
constexpr int64_t steps_until_slow = 4, steps_until_soon = 2, steps_until_over = 3;

}  // namespace

double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Recent::add(double value) {
  if (values_.size() == remembered) values_.pop_front();
  values_.push_back(value);
}

double deviation(std::span<const Recent> all, double share) {
  std::vector<double> deviations;
  for (const Recent& one : all) {
    const double middle = one.median();
    for (const double value : one) deviations.push_back(std::abs(value - middle));
  }
  if (deviations.empty()) return 0;
  const auto at = deviations.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(deviations.size() - 1));
  std::nth_element(deviations.begin(), at, deviations.end());
  return *at;
}

double variation(std::span<const Recent> all) {
  return 1.4826 * deviation(all, 0.5);
}

Episode::Turn Episode::add(int64_t step, double beyond, const Usual& usual) {
  const auto exceeds = [&](double share, double times, double share_of_part, double times_of_part) {
    const auto is_more = [&](double value, double of_step, double varies) {
      return value > std::max({least_seconds, of_step * usual.step_seconds, varies});
    };
    return is_more(beyond, share, times * usual.variation) || std::ranges::any_of(usual.parts, [&](const Part& part) {
             return is_more(std::min(beyond, part.beyond), share_of_part, times_of_part * part.variation);
           });
  };
  if (!exceeds(usual.least_share, least_variations, usual.least_share, least_variations)) {
    suspected_ = clear_ = 0;
    if (slow() && ++quiet_ < steps_until_over) return Turn::none;
    return std::exchange(*this, {}).slow() ? Turn::over : Turn::none;
  }
  if (since_ == 0) since_ = step;
  quiet_ = 0;
  ++suspected_;
  const double soon = std::max(share_soon, usual.least_share);
  clear_ = exceeds(soon, least_variations, soon, least_variations) ? clear_ + 1 : 0;
  const bool at_once = exceeds(share_at_once, variations_at_once, part_at_once, part_variations_at_once);
  const bool lasts = clear_ >= steps_until_soon || suspected_ >= steps_until_slow;
  const bool tell = slow() ? at_once && beyond >= worse * told_ : at_once || lasts;
  if (!tell) return Turn::none;
  told_ = beyond;
  return Turn::slow;
}

}  // namespace tesserae::monitor
