#pragma once

#include <cstdint>

#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

/// SplitMix64's finalizer: neighbouring seeds give unrelated generators.
inline uint64_t mixed(uint64_t seed) {
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebu;
  return seed ^ (seed >> 31);
}

/// Another one for each tensor index, from one that the ranks share.
inline uint64_t own_seed(uint64_t shared, const Parallel& parallel) {
  return mixed(shared + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(parallel.index() + 1));
}

}  // namespace tesserae::tensor
