#pragma once

#include <cstdint>
#include <string_view>

namespace tesserae::optim {

/// The learning rate as a pure function of the step: nothing to save, nothing to restore.
struct Schedule {
  /// How the rate falls from the end of the warm-up to total_steps.
  enum class Decay { constant, linear, cosine };

  double peak = 3e-4;        ///< reached when the warm-up ends
  int64_t warmup_steps = 0;  ///< rises linearly over so many steps; the first of them already has peak / warmup_steps
  int64_t total_steps = 0;   ///< the decay ends here; the rate stays at peak * min_ratio afterwards
  double min_ratio = 0.1;    ///< of the peak, where the decay ends
  Decay decay = Decay::cosine;  ///< constant: the rate stays at peak

  /// The rate of that step, counted from 0.
  double at(int64_t step) const;
};

/// "constant", "linear" or "cosine"; throws InvalidArgument for anything else, naming the nearest.
Schedule::Decay decay_from_name(std::string_view name);

}  // namespace tesserae::optim
