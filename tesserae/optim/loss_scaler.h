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
  /// How the scale moves.
  struct Options {
    double initial = 65536;          ///< the scale of the first step
    double growth = 2;               ///< what the scale is multiplied by when it grows
    double backoff = 0.5;            ///< what it is multiplied by after gradients overflowed
    int64_t growth_interval = 2000;  ///< good steps in a row before the scale grows
    double minimum = 1;              ///< the scale does not fall below it
  };
  /// What a checkpoint keeps.
  struct State {
    double scale = 0;        ///< of the next step
    int64_t good_steps = 0;  ///< in a row, since the scale changed
  };

  LossScaler() : LossScaler(Options{}) {}
  /// Throws InvalidArgument unless growth > 1, 0 < backoff < 1, growth_interval > 0 and 0 < minimum <= initial.
  explicit LossScaler(const Options& options);

  /// The loss to run backward from: times the scale, differentiable.
  at::Tensor scale(const at::Tensor& loss) const { return loss.mul(state_.scale); }
  /// The scale of the next step.
  double scale() const { return state_.scale; }

  /// Whether the scale cannot fall any further: if gradients are not finite now, the scale is not why.
  bool at_minimum() const { return state_.scale <= options_.minimum; }

  /// Tells how the step's gradients were. Called by Optimizer::step.
  void update(bool finite);

  const State& state() const { return state_; }            ///< for a checkpoint
  void load_state(const State& state) { state_ = state; }  ///< from one

 private:
  Options options_;
  State state_;
};

}  // namespace tesserae::optim
