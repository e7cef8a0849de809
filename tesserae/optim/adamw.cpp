#include "tesserae/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include "tesserae/base/error.h"

namespace tesserae::optim {

namespace {

const AdamWOptions& checked(const AdamWOptions& options) {
  for (const double beta : {options.beta1, options.beta2}) {
    if (!(beta >= 0 && beta < 1)) throw InvalidArgument("AdamW", cat("beta is ", beta, "; it must lie in [0, 1)"));
  }
  if (!(options.eps >= 0)) throw InvalidArgument("AdamW", cat("eps is ", options.eps, "; it must be >= 0"));
  if (!(options.weight_decay >= 0)) {
    throw InvalidArgument("AdamW", cat("weight_decay is ", options.weight_decay, "; it must be >= 0"));
  }
  return options;
}

}  // namespace

AdamW::AdamW(std::shared_ptr<Target> target, AdamWOptions options)
    : Optimizer(std::move(target), checked(options).lr, options.decays), options_(std::move(options)) {}

const std::vector<std::string>& AdamW::state_names() const {
  static const std::vector<std::string> names = {"exp_avg", "exp_avg_sq"};
  return names;
}

void AdamW::update(const Views& views, bool decay, double lr, const Scale& scale) {
  at::_fused_adamw_(views.master, views.grad, views.state[0], views.state[1], /*max_exp_avg_sqs=*/{}, views.step, lr,
                    options_.beta1, options_.beta2, decay ? options_.weight_decay : 0.0, options_.eps,
                    /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/scale.divisor, /*found_inf=*/scale.skip);
}

}  // namespace tesserae::optim
