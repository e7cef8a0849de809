#include "tesserae/data/sampler.h"

#include "tesserae/base/error.h"
#include "tesserae/data/permutation.h"

namespace tesserae::data {

Sampler::Sampler(int64_t samples, uint64_t seed) : samples_(samples), seed_(seed) {
  if (samples < 1) throw InvalidArgument("Sampler", cat("there are ", samples, " samples; at least one is needed"));
}

int64_t Sampler::at(const Position& position) const {
  return Permutation(samples_, seed_, static_cast<uint64_t>(position.epoch))(position.offset);
}

Position Sampler::advance(const Position& position, int64_t by) const {
  const int64_t offset = position.offset + by;
  return {position.epoch + offset / samples_, offset % samples_};
}

}  // namespace tesserae::data
