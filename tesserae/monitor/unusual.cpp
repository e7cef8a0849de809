#include "tesserae/monitor/unusual.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tesserae::monitor {
namespace {

constexpr double least_seconds = 0.01;  // a scheduler's tick is nobody's fault
constexpr double least_variations = 4;
constexpr double share_at_once = 0.5, variations_at_once = 8;
constexpr double worse = 4;
constexpr int64_t steps_until_slow = 2, steps_until_over = 3;

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

double variation(std::span<const Recent> all) {
  std::vector<double> deviations;
  for (const Recent& one : all) {
    const double middle = one.median();
    for (const double value : one) deviations.push_back(std::abs(value - middle));
  }
  return 1.4826 * lower_median(std::move(deviations));
}

Episode::Turn Episode::add(int64_t step, double beyond, const Usual& usual) {
  const auto exceeds = [&](double share, double times) {
    return beyond > std::max({least_seconds, share * usual.step_seconds, times * usual.variation});
  };
  if (!exceeds(usual.least_share, least_variations)) {
    suspected_ = 0;
    if (slow() && ++quiet_ < steps_until_over) return Turn::none;
    return std::exchange(*this, {}).slow() ? Turn::over : Turn::none;
  }
  if (since_ == 0) since_ = step;
  quiet_ = 0;
  ++suspected_;
  const bool at_once = exceeds(share_at_once, variations_at_once);
  const bool tell = slow() ? at_once && beyond >= worse * told_ : at_once || suspected_ >= steps_until_slow;
  if (!tell) return Turn::none;
  told_ = beyond;
  return Turn::slow;
}

}  // namespace tesserae::monitor
