#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tesserae/data/sampler.h"
#include "tesserae/data/schedule.h"

namespace tesserae::data {

/// The order of the samples of one source (a Sampler's), or of several with weights: Schedule says which source is
/// next, and each source goes through its samples in an order of its own, and again in another when it is through. A
/// pure function of seed and position, the same for every number of ranks.
class Mixture {
 public:
  /// `samples` and `weights` of each source. Throws InvalidArgument for a source without a sample and for weights that
  /// cannot be.
  Mixture(const std::vector<int64_t>& samples, const std::vector<double>& weights, uint64_t seed);

  /// Of all sources. So many make an epoch of positions; with several sources, some are seen more often in it than
  /// others.
  int64_t samples() const { return all_.samples(); }

  struct Sample {
    size_t source;
    int64_t index;  ///< in the source
    bool operator==(const Sample&) const = default;
  };
  Sample at(const Position& position) const;
  Position advance(const Position& position, int64_t by) const { return all_.advance(position, by); }

 private:
  std::vector<Sampler> sources_;
  Sampler all_;
  std::optional<Schedule> schedule_;  // none: of one source
};

}  // namespace tesserae::data
