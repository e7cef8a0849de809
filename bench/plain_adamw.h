#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tesserae/optim/adamw.h"

namespace torch::nn {
class Module;
}

namespace tesserae::bench {

/// torch's fused AdamW on the parameters of a model that nobody sharded: what a run without communication costs. Not
/// optim::AdamW, so that the comparison does not depend on what it compares.
class PlainAdamW {
 public:
  /// Turns the parameters to `compute`. If that is not the dtype they have, the optimizer keeps masters of theirs, as
  /// mixed precision does.
  PlainAdamW(torch::nn::Module& model, c10::ScalarType compute, const optim::AdamWOptions& options = {});

  void step();
  void zero_grad();

 private:
  struct Part {  // parameters with the same weight decay
    std::vector<at::Tensor> parameters, masters, first_moments, second_moments, steps;
    double weight_decay = 0;
  };

  void update(Part& part);

  Part decaying_, rest_;
  optim::AdamWOptions options_;
};

}  // namespace tesserae::bench
