#pragma once

#include <array>
#include <cstdint>

namespace tesserae::data {

/// A pseudo-random permutation of [0, size), computed element by element: no memory for each element, the same on every
/// machine. An alternating Feistel network over the next power of two; numbers outside are sent through again ("cycle
/// walking", Black and Rogaway, 2002).
class Permutation {
 public:
  /// size > 0. Different (seed, stream) give different permutations.
  Permutation(int64_t size, uint64_t seed, uint64_t stream = 0);

  int64_t size() const { return size_; }
  /// Where `index` in [0, size) is sent to.
  int64_t operator()(int64_t index) const;

 private:
  static constexpr int rounds = 8;  // even: the halves change places in each round

  uint64_t encrypt(uint64_t value) const;

  int64_t size_;
  int left_bits_, right_bits_;
  std::array<uint64_t, rounds> keys_;
};

}  // namespace tesserae::data
