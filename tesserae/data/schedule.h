#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tesserae::data {

/// Which of several sources each sample of a mixture comes from: after any number n of samples every source has had its
/// share of them, weight * n, to less than one sample, rounded up or down. No randomness, and a pure function of the
/// weights and n.
///
/// It repeats itself after `period` samples, the smallest number (up to 100,000) in which every weight is a whole
/// number of samples; 2^20, to which weights are then rounded, where there is none.
class Schedule {
 public:
  /// Weights are relative: {3, 1} is {0.75, 0.25}. Throws InvalidArgument for no weight, for one that is not above 0,
  /// and for one that is less than 2^-21 of all.
  explicit Schedule(const std::vector<double>& weights);

  struct Turn {
    size_t source;
    int64_t index;  ///< of its samples, from 0
    bool operator==(const Turn&) const = default;
  };
  Turn at(int64_t sample) const;
  int64_t period() const { return static_cast<int64_t>(sources_.size()); }

 private:
  std::vector<int64_t> counts_;    // of samples in a period, by source
  std::vector<uint16_t> sources_;  // of each sample of a period
  std::vector<uint32_t> indices_;
};

}  // namespace tesserae::data
