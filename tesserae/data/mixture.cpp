#include "tesserae/data/mixture.h"

#include <numeric>

#include "tesserae/base/error.h"

namespace tesserae::data {

Mixture::Mixture(const std::vector<int64_t>& samples, const std::vector<double>& weights, uint64_t seed)
    : all_(std::accumulate(samples.begin(), samples.end(), int64_t{0}), seed) {
  if (samples.size() != weights.size()) {
    throw InvalidArgument("Mixture",
                          cat(weights.size(), " weights for ", samples.size(), " sources; give one for each"));
  }
  for (const int64_t count : samples) sources_.emplace_back(count, seed + sources_.size());
  if (samples.size() > 1) schedule_.emplace(weights);
}

Mixture::Sample Mixture::at(const Position& position) const {
  if (!schedule_) return {0, sources_[0].at(position)};
  const auto [source, index] = schedule_->at(position.epoch * samples() + position.offset);
  const Sampler& sampler = sources_[source];
  return {source, sampler.at(sampler.advance({}, index))};
}

}  // namespace tesserae::data
