#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tesserae::optim {

/// Dynamic loss scaling for fp16 (Micikevicius et al., 2018, arXiv:1710.03740). Gradients of a scaled loss stay above
/// fp16's smallest number; a step whose gradients overflowed is skipped and the scale is lowered.
///
///   scaler.scale(loss).backward();
///   optimizer.step({.scaler = &scaler});
///
/// All ranks, tensor-parallel ones included, see the same all-reduced norm, so their scales never differ.
class LossScaler {
 public:
  struct Options {
    double initial = 65536;
    double growth = 2;
    double backoff = 0.5;
    int64_t growth_interval = 2000;  ///< good steps in a row before the scale grows
    double minimum = 1;
  };
  /// What a checkpoint keeps.
  struct State {
    double scale = 0;
    int64_t good_steps = 0;
  };

  LossScaler() : LossScaler(Options{}) {}
  /// Throws InvalidArgument unless growth > 1, 0 < backoff < 1, growth_interval > 0 and 0 < minimum <= initial.
  explicit LossScaler(const Options& options);

  at::Tensor scale(const at::Tensor& loss) const { return loss.mul(state_.scale); }
  double scale() const { return state_.scale; }

  /// Tells how the step's gradients were. Called by Optimizer::step.
  void update(bool finite);

  const State& state() const { return state_; }
  void load_state(const State& state) { state_ = state; }

 private:
  Options options_;
  State state_;
};

}  // namespace tesserae::optim
