#include "tesserae/data/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tesserae/base/error.h"

namespace tesserae::data {
namespace {

std::vector<double> shares_of(const std::vector<double>& weights) {
  if (weights.empty() || weights.size() > std::numeric_limits<uint16_t>::max()) {
    throw InvalidArgument("Schedule", cat("there are ", weights.size(), " weights; give 1 to 65535"));
  }
  for (const double weight : weights) {
    if (!(weight > 0 && std::isfinite(weight))) {
      throw InvalidArgument("Schedule", cat("a weight is ", weight, "; weights are above 0, and a source that is not ",
                                            "to be read is left out"));
    }
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> shares;
  for (const double weight : weights) shares.push_back(weight / sum);
  return shares;
}

std::vector<int64_t> rounded(const std::vector<double>& shares, int64_t period) {
  std::vector<int64_t> counts;
  for (const double share : shares) counts.push_back(std::llround(share * static_cast<double>(period)));
  return counts;
}

bool fits(const std::vector<double>& shares, const std::vector<int64_t>& counts, int64_t period) {
  for (size_t i = 0; i < shares.size(); ++i) {
    const double exact = shares[i] * static_cast<double>(period);
    if (counts[i] == 0 || std::abs(static_cast<double>(counts[i]) - exact) > 1e-12 * static_cast<double>(period)) {
      return false;
    }
  }
  return std::accumulate(counts.begin(), counts.end(), int64_t{0}) == period;
}

/// How many samples of a period each source has.
std::vector<int64_t> counts_of(const std::vector<double>& shares) {
  for (int64_t period = 1; period <= 100'000; ++period) {
    std::vector<int64_t> counts = rounded(shares, period);
    if (fits(shares, counts, period)) return counts;
  }
  constexpr int64_t period = 1 << 20;
  std::vector<int64_t> counts = rounded(shares, period);
  if (const auto none = std::ranges::find(counts, 0); none != counts.end()) {
    throw InvalidArgument("Schedule", cat("a weight is ", shares[static_cast<size_t>(none - counts.begin())],
                                          " of the sum of all; it must be 2^-21 of it at least"));
  }
  // What rounding has added or taken goes to the largest, where it matters least.
  *std::ranges::max_element(counts) += period - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  return counts;
}

}  // namespace

// Sample m of a source with share w may not come before sample floor(m / w) of the mixture, nor after the one before
// ceil((m + 1) / w). Of those that may come, the one that must come first is taken. The shares add up to 1, so this
// earliest-deadline rule keeps every deadline (the proof is that of Pfair schedules on one processor: Baruah, Cohen,
// Plaxton and Varvel, 1996).
Schedule::Schedule(const std::vector<double>& weights) : counts_(counts_of(shares_of(weights))) {
  const int64_t period = std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
  struct Next {
    int64_t index, release, deadline;
  };
  const auto next = [&](size_t source, int64_t index) {
    const int64_t count = counts_[source];
    return Next{index, index * period / count, ((index + 1) * period + count - 1) / count};
  };
  std::vector<Next> waiting;
  for (size_t source = 0; source < counts_.size(); ++source) waiting.push_back(next(source, 0));
  for (int64_t sample = 0; sample < period; ++sample) {
    size_t first = waiting.size();
    for (size_t source = 0; source < waiting.size(); ++source) {
      if (waiting[source].release > sample) continue;
      if (first == waiting.size() || waiting[source].deadline < waiting[first].deadline) first = source;
    }
    sources_.push_back(static_cast<uint16_t>(first));
    indices_.push_back(static_cast<uint32_t>(waiting[first].index));
    waiting[first] = next(first, waiting[first].index + 1);
  }
}

Schedule::Turn Schedule::at(int64_t sample) const {
  const auto in_period = static_cast<size_t>(sample % period());
  const size_t source = sources_[in_period];
  return {source, sample / period() * counts_[source] + indices_[in_period]};
}

}  // namespace tesserae::data
