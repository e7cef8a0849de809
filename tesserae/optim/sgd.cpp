#include "tesserae/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include "tesserae/base/error.h"

namespace tesserae::optim {

namespace {

const SgdOptions& checked(const SgdOptions& options) {
  if (!(options.momentum >= 0))
    throw InvalidArgument("Sgd", cat("momentum is ", options.momentum, "; it must be >= 0"));
  if (options.nesterov && options.momentum == 0) throw InvalidArgument("Sgd", "nesterov needs a momentum > 0");
  if (!(options.weight_decay >= 0)) {
    throw InvalidArgument("Sgd", cat("weight_decay is ", options.weight_decay, "; it must be >= 0"));
  }
  return options;
}

}  // namespace

Sgd::Sgd(std::shared_ptr<Target> target, SgdOptions options)
    : Optimizer(std::move(target), checked(options).lr, options.decays), options_(std::move(options)) {}

const std::vector<std::string>& Sgd::state_names() const {
  static const std::vector<std::string> none;
  static const std::vector<std::string> names = {"momentum_buffer"};
  return options_.momentum == 0 ? none : names;
}

void Sgd::update(const Views& views, bool decay, double lr, const Scale& scale) {
  // Without dampening, a buffer of zeros gives the first step's buffer (the gradient itself), so no step is special.
  const auto buffers = options_.momentum == 0 ? at::TensorList{} : at::TensorList(views.state[0]);
  at::_fused_sgd_(views.master, views.grad, buffers, decay ? options_.weight_decay : 0.0, options_.momentum, lr,
                  /*dampening=*/0.0, options_.nesterov, /*maximize=*/false, /*is_first_step=*/false,
                  /*grad_scale=*/scale.divisor, /*found_inf=*/scale.skip);
}

}  // namespace tesserae::optim
