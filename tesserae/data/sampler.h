#pragma once

#include <cstdint>

namespace tesserae::data {

/// How far training has come in its data; all that a checkpoint needs to keep.
struct Position {
  int64_t epoch = 0;
  int64_t offset = 0;  ///< samples of this epoch that were used

  bool operator==(const Position&) const = default;
};

/// The order of samples: each exactly once an epoch, in a new order each epoch. A pure function of seed and position,
/// so it is the same for every number of ranks and every layout, and nothing has to be replayed after a restart.
class Sampler {
 public:
  Sampler(int64_t samples, uint64_t seed);

  int64_t samples() const { return samples_; }
  /// The sample at that position.
  int64_t at(const Position& position) const;
  /// The position `by` samples later. A batch may begin in one epoch and end in the next.
  Position advance(const Position& position, int64_t by) const;

 private:
  int64_t samples_;
  uint64_t seed_;
};

}  // namespace tesserae::data
