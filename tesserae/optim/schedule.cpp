#include "tesserae/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tesserae/base/error.h"
#include "tesserae/base/nearest.h"

namespace tesserae::optim {

double Schedule::at(int64_t step) const {
  if (step < warmup_steps) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  if (decay == Decay::constant) return peak;

  const int64_t length = std::max<int64_t>(1, total_steps - warmup_steps);
  const double progress = std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(length));
  const double left = decay == Decay::linear ? 1.0 - progress : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak * (min_ratio + (1.0 - min_ratio) * left);
}

Schedule::Decay decay_from_name(std::string_view name) {
  if (name == "constant") return Schedule::Decay::constant;
  if (name == "linear") return Schedule::Decay::linear;
  if (name == "cosine") return Schedule::Decay::cosine;
  throw InvalidArgument("decay_from_name", cat("unknown schedule \"", name, "\"; did you mean \"",
                                               nearest(name, {"constant", "linear", "cosine"}), "\"?"));
}

}  // namespace tesserae::optim
