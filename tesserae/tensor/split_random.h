#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

/// Random numbers of computation on split tensors, for layers that draw from the default generators themselves (dropout
/// inside somebody else's attention): between begin() and end() the default generators of the host and of the device
/// are this rank's own; afterwards they are as they were, one number of the host's generator further. Ranks that are
/// seeded alike are so again after end(), and what is recomputed from the same state draws the same
/// (autograd/recompute.h, torch.utils.checkpoint). Called by the thread that computes.
class SplitRandom {
 public:
  /// `seed`: the job's (random_seed); with the tensor index and the drawn number it makes the rank's own.
  SplitRandom(const Parallel& parallel, uint64_t seed, at::Device device);

  void begin();  ///< inside: does nothing
  void end();    ///< outside: does nothing
  bool inside() const { return !saved_.empty(); }

 private:
  struct Saved {
    at::Generator generator;
    at::Tensor state;
  };

  uint64_t seed_;
  at::Device device_;
  std::vector<Saved> saved_;
};

}  // namespace tesserae::tensor
