#include "tesserae/dial/belief.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <utility>

#include "tesserae/base/median.h"

namespace tesserae::dial {
namespace {

// The stated errors: how much of a stage a step shows, the same for all stages and of each beside that; and what the
// plan does not know of a layout, as a share of a step.
constexpr double shown = 0.8, error_of_all = 0.4, error_of_a_stage = 0.25, error_of_a_layout = 0.03;
constexpr double factors[] = {1, 2, 4, 8, 16};
// Of a visit, whatever its steps say: the machine is not the same at every moment.
constexpr double least_noise = 0.01;
constexpr double deviation_of_median = std::numbers::pi / 2;  // its variance over that of a mean, of normal values
constexpr double unknown = 10;                                // C, in steps

double square(double value) {
  return value * value;
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

double product(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

/// Solves root y = values, root being lower triangular and as long as `values`.
std::vector<double> solve(const std::vector<std::vector<double>>& root, std::vector<double> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) values[i] -= root[i][j] * values[j];
    values[i] /= root[i][i];
  }
  return values;
}

}  // namespace

double relative_spread(const std::vector<double>& values) {
  const double center = median(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - center));
  return 1.48 * median(deviations) / center;
}

Belief::Belief(std::vector<std::vector<double>> stages) : stages_(std::move(stages)) {}

void Belief::saw(std::size_t layout, const std::vector<double>& seconds) {
  visits_.push_back({.layout = layout, .seconds = seconds, .middle = median(seconds)});
  fit();
}

void Belief::rescale(double factor) {
  for (Visit& visit : visits_) {
    for (double& value : visit.seconds) value *= factor;
    visit.middle *= factor;
  }
  if (!visits_.empty()) fit();
}

bool Belief::visited(std::size_t layout) const {
  return std::ranges::find(visits_, layout, &Visit::layout) != visits_.end();
}

double Belief::measured(std::size_t layout) const {
  std::vector<double> all;
  for (const Visit& visit : visits_) {
    if (visit.layout == layout) all.insert(all.end(), visit.seconds.begin(), visit.seconds.end());
  }
  return median(std::move(all));
}

double Belief::predicted(std::size_t layout) const {
  const Visit& first = visits_.front();
  return std::max(0.0, first.middle + shown * (sum(stages_[layout]) - sum(stages_[first.layout])));
}

/// What is believed before any visit, without C, whose error is beyond all others.
double Belief::covariance(std::size_t a, std::size_t b) const {
  const double step = visits_.front().middle;
  const double stages = square(error_of_all) * sum(stages_[a]) * sum(stages_[b]) +
                        square(error_of_a_stage) * product(stages_[a], stages_[b]);
  return square(scale_) * (stages + (a == b ? square(error_of_a_layout * step) : 0)) + square(unknown * step);
}

/// The variance of what a visit of so many steps shows, beside that of the layout's own seconds.
double Belief::noise_of(std::size_t steps) const {
  const double step = visits_.front().middle;
  return square(step) * (square(noise_) * deviation_of_median / static_cast<double>(steps) + square(least_noise));
}

/// Of a layout, what its covariances with the visits are to root_.
std::vector<double> Belief::weights(std::size_t layout) const {
  std::vector<double> known;
  for (const Visit& visit : visits_) known.push_back(covariance(layout, visit.layout));
  return solve(root_, std::move(known));
}

double Belief::seconds(std::size_t layout) const {
  return shown * sum(stages_[layout]) + product(weights(layout), residual_);
}

double Belief::believed_covariance(std::size_t a, std::size_t b) const {
  return covariance(a, b) - product(weights(a), weights(b));
}

double Belief::error(std::size_t layout, std::size_t against) const {
  const double variance = believed_covariance(layout, layout) + believed_covariance(against, against) -
                          2 * believed_covariance(layout, against);
  return std::sqrt(std::max(variance, 0.0));
}

double Belief::expected_gain(std::size_t layout, std::size_t other, std::size_t best, int steps) const {
  // A visit moves the difference that is believed by a normal number of this deviation (the knowledge gradient:
  // Frazier, Powell and Dayanik, 2009). What never ran is judged by all that is not known of it: noise is no reason not
  // to look.
  const double variance = believed_covariance(layout, layout) + noise_of(static_cast<std::size_t>(steps));
  const double seen = std::abs(believed_covariance(layout, best) - believed_covariance(layout, other));
  const double moved = visited(layout) ? seen / std::sqrt(variance) : error(layout, best);
  if (moved <= 0) return 0;
  const double behind = std::max(0.0, seconds(other) - seconds(best)) / moved;
  const double density = std::exp(-square(behind) / 2) / std::sqrt(2 * std::numbers::pi);
  return moved * (density - behind * std::erfc(behind / std::numbers::sqrt2) / 2);
}

/// Makes root_ and residual_ with this factor; returns the logarithm of how likely the visits are.
double Belief::fit(double scale) {
  scale_ = scale;
  const std::size_t count = visits_.size();
  root_.assign(count, std::vector<double>(count, 0.0));
  std::vector<double> residual(count);
  double likely = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Visit& visit = visits_[i];
    residual[i] = visit.middle - shown * sum(stages_[visit.layout]);
    for (std::size_t j = 0; j <= i; ++j) {
      double value = covariance(visit.layout, visits_[j].layout) + (i == j ? noise_of(visit.seconds.size()) : 0);
      for (std::size_t k = 0; k < j; ++k) value -= root_[i][k] * root_[j][k];
      root_[i][j] = i == j ? std::sqrt(std::max(value, std::numeric_limits<double>::min())) : value / root_[j][j];
    }
    likely -= std::log(root_[i][i]);
  }
  residual_ = solve(root_, std::move(residual));
  return likely - product(residual_, residual_) / 2;
}

void Belief::fit() {
  // Of all steps, how far they are from the middle of their visit, which itself is none of them.
  std::vector<double> deviations;
  for (const Visit& visit : visits_) {
    bool middle = false;
    for (const double value : visit.seconds) {
      if (!middle && value == visit.middle) {
        middle = true;
        continue;
      }
      deviations.push_back(std::abs(value / visit.middle - 1));
    }
  }
  noise_ = deviations.empty() ? 0 : 1.48 * median(std::move(deviations));
  double best = 0, best_factor = 0;
  for (const double factor : factors) {
    const double likely = fit(factor);
    if (best_factor == 0 || likely > best) {
      best = likely;
      best_factor = factor;
    }
  }
  fit(best_factor);
}

}  // namespace tesserae::dial
