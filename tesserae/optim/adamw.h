#pragma once

#include "tesserae/optim/optimizer.h"

namespace tesserae::optim {

/// The numbers of AdamW; lr may change from step to step (StepOptions::lr).
struct AdamWOptions {
  double lr = 3e-4;                       ///< learning rate
  double beta1 = 0.9;                     ///< decay of the mean of gradients
  double beta2 = 0.95;                    ///< decay of the mean of their squares
  double eps = 1e-8;                      ///< added to the root of the second
  double weight_decay = 0.1;              ///< times lr, of the master at each step; where `decays` says so
  DecayPolicy decays = decays_if_matrix;  ///< which parameters decay; by default those of two dimensions or more
};

/// AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) with decoupled weight decay, through torch's fused kernel.
/// State: "exp_avg", "exp_avg_sq", "step".
class AdamW : public Optimizer {
 public:
  explicit AdamW(std::shared_ptr<Target> target, AdamWOptions options = {});
  ~AdamW() override { end(); }
  explicit AdamW(shard::Sharded& sharded, AdamWOptions options = {}) : AdamW(target_of(sharded), std::move(options)) {}

 protected:
  const std::vector<std::string>& state_names() const override;
  void update(const Views& views, bool decay, double lr, const Scale& scale) override;

 private:
  AdamWOptions options_;
};

}  // namespace tesserae::optim
