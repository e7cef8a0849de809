#include "tesserae/optim/loss_scaler.h"

#include <algorithm>

#include "tesserae/base/error.h"

namespace tesserae::optim {

LossScaler::LossScaler(const Options& options) : options_(options), state_{options.initial, 0} {
  if (!(options.growth > 1)) throw InvalidArgument("LossScaler", cat("growth is ", options.growth, "; it must be > 1"));
  if (!(options.backoff > 0 && options.backoff < 1)) {
    throw InvalidArgument("LossScaler", cat("backoff is ", options.backoff, "; it must lie between 0 and 1"));
  }
  if (options.growth_interval < 1) {
    throw InvalidArgument("LossScaler", cat("growth_interval is ", options.growth_interval, "; it must be >= 1"));
  }
  if (!(options.minimum > 0 && options.minimum <= options.initial)) {
    throw InvalidArgument("LossScaler", cat("minimum is ", options.minimum, " and initial ", options.initial,
                                            "; 0 < minimum <= initial must hold"));
  }
}

void LossScaler::update(bool finite) {
  if (!finite) {
    state_.scale = std::max(state_.scale * options_.backoff, options_.minimum);
    state_.good_steps = 0;
  } else if (++state_.good_steps == options_.growth_interval) {
    state_.scale *= options_.growth;
    state_.good_steps = 0;
  }
}

}  // namespace tesserae::optim
