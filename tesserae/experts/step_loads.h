#pragma once

#include <torch/nn/module.h>

#include <span>
#include <vector>

#include "tesserae/experts/moe.h"

namespace tesserae::experts {

/// What the mixtures below a module tell at the edge of a step, as numbers for a sum over all ranks of the job that is
/// made anyway: a training loop adds to_sum() to what its ranks agree on, and hands the sums to from_sums(). From
/// the thread that computes, between steps. Keeps pointers to the layers, which outlive it.
class StepLoads {
 public:
  explicit StepLoads(torch::nn::Module& root);

  /// Before the first forward of a step: what a step that was broken off has counted is forgotten.
  void begin_step();
  /// Nothing where there are no mixtures; else always as many.
  std::vector<double> to_sum() const;
  /// Moves the biases of the routers that have one (RouterImpl::update_bias) if the step has `updated` the model, and
  /// returns the Load of each layer's last forward over all ranks: tokens of a tensor group count once, bytes as often
  /// as they were sent.
  std::vector<Load> from_sums(std::span<const double> sums, bool updated);

 private:
  std::vector<MoeImpl*> layers_;
};

}  // namespace tesserae::experts
