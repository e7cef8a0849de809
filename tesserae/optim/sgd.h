#pragma once

#include "tesserae/optim/optimizer.h"

namespace tesserae::optim {

/// The numbers of SGD; lr may change from step to step (StepOptions::lr).
struct SgdOptions {
  double lr = 0.1;                        ///< learning rate
  double momentum = 0;                    ///< 0: none, and no state but the counter
  bool nesterov = false;                  ///< with momentum only
  double weight_decay = 0;                ///< added to the gradient, as torch.optim.SGD does
  DecayPolicy decays = decays_if_matrix;  ///< which parameters decay; by default those of two dimensions or more
};

/// Stochastic gradient descent with momentum; the numbers of torch.optim.SGD without dampening, through torch's fused
/// kernel; on the CPU in bf16 and fp16, which that leaves alone, computed in fp32. State: "momentum_buffer" if momentum
/// is not 0, "step".
class Sgd : public Optimizer {
 public:
  explicit Sgd(std::shared_ptr<Target> target, SgdOptions options = {});
  ~Sgd() override { end(); }
  explicit Sgd(shard::Sharded& sharded, SgdOptions options = {}) : Sgd(target_of(sharded), std::move(options)) {}

 protected:
  const std::vector<std::string>& state_names() const override;
  void update(const Views& views, bool decay, double lr, const Scale& scale) override;

 private:
  void update_in_fp32(const Views& views, bool decay, double lr, const Scale& scale) const;

  SgdOptions options_;
};

}  // namespace tesserae::optim
