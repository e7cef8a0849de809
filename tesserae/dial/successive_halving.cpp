#include "tesserae/dial/successive_halving.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::dial {
namespace {

constexpr double deviation_of_median = 1.57;  // pi / 2: its variance over that of a mean, of normal values

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double relative_spread(const std::vector<double>& values) {
  const double center = median(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - center));
  return 1.48 * median(deviations) / center;
}

SuccessiveHalving::SuccessiveHalving(const mesh::Degrees& in_use, std::vector<double> seconds)
    : arms_{{.degrees = in_use, .seconds = std::move(seconds)}}, last_(in_use) {}

void SuccessiveHalving::visit(const mesh::Degrees& degrees) {
  arms_.push_back({.degrees = degrees, .seconds = {}});
  last_ = degrees;
}

void SuccessiveHalving::add(const mesh::Degrees& degrees, double seconds) {
  const auto found = std::ranges::find(arms_, degrees, &Arm::degrees);
  if (found != arms_.end()) found->seconds.push_back(seconds);
}

std::optional<mesh::Degrees> SuccessiveHalving::again() {
  first_round_ = false;
  if (queue_.empty()) halve();
  if (queue_.empty()) return std::nullopt;
  visited_again_ = true;
  last_ = queue_.front();
  queue_.pop_front();
  return last_;
}

/// The slower half leaves; the others form the next round, the one that was visited last at its end.
void SuccessiveHalving::halve() {
  std::vector<Arm*> left;
  for (Arm& arm : arms_) {
    arm.left = arm.left && !arm.seconds.empty();
    if (arm.left) left.push_back(&arm);
  }
  std::ranges::stable_sort(left, {}, [](const Arm* arm) { return median(arm->seconds); });
  const size_t keep = std::max<size_t>(left.size() / 2, 1);
  for (size_t i = keep; i < left.size(); ++i) left[i]->left = false;
  if (keep == 1) return;
  for (size_t i = 0; i < keep; ++i) {
    if (left[i]->degrees != last_) queue_.push_back(left[i]->degrees);
  }
  if (queue_.size() < keep) queue_.push_back(last_);
}

const mesh::Degrees& SuccessiveHalving::best() const {
  const Arm* best = nullptr;
  for (const Arm& arm : arms_) {
    if (!arm.left || arm.seconds.empty()) continue;
    if (best == nullptr || median(arm.seconds) < median(best->seconds)) best = &arm;
  }
  if (best == nullptr) throw InvalidArgument("SuccessiveHalving::best", "no layout has a measured step");
  return best->degrees;
}

const SuccessiveHalving::Arm& SuccessiveHalving::arm(const mesh::Degrees& degrees) const {
  const auto found = std::ranges::find(arms_, degrees, &Arm::degrees);
  if (found == arms_.end() || found->seconds.empty()) {
    throw InvalidArgument("SuccessiveHalving", cat(mesh::to_string(degrees), " has no measured step"));
  }
  return *found;
}

double SuccessiveHalving::seconds(const mesh::Degrees& degrees) const {
  return median(arm(degrees).seconds);
}

double SuccessiveHalving::noise(const mesh::Degrees& degrees) const {
  const std::vector<double>& values = arm(degrees).seconds;
  return relative_spread(values) * std::sqrt(deviation_of_median / static_cast<double>(values.size()));
}

std::vector<mesh::Degrees> SuccessiveHalving::measured() const {
  std::vector<mesh::Degrees> found;
  for (const Arm& arm : arms_) {
    if (!arm.seconds.empty()) found.push_back(arm.degrees);
  }
  return found;
}

}  // namespace tesserae::dial
