#pragma once

#include "tesserae/optim/optimizer.h"

namespace tesserae::optim {

struct AdamWOptions {
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  DecayPolicy decays = decays_if_matrix;
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
  void update(const Views& views, bool decay, double lr, const std::optional<at::Tensor>& divisor) override;

 private:
  AdamWOptions options_;
};

}  // namespace tesserae::optim
