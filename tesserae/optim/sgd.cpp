#include "tesserae/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <algorithm>

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

/// torch's fused kernel leaves most of a tensor in bf16 or fp16 as it is on the CPU (2.13).
bool is_left_alone(const at::Tensor& master) {
  return master.is_cpu() && c10::isReducedFloatingType(master.scalar_type());
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
  if (!views.master.empty() && is_left_alone(views.master.front())) {
    update_in_fp32(views, decay, lr, scale);
    return;
  }
  const auto buffers = options_.momentum == 0 ? at::TensorList{} : at::TensorList(views.state[0]);
  at::_fused_sgd_(views.master, views.grad, buffers, decay ? options_.weight_decay : 0.0, options_.momentum, lr,
                  /*dampening=*/0.0, options_.nesterov, /*maximize=*/false, /*is_first_step=*/false,
                  /*grad_scale=*/scale.divisor, /*found_inf=*/scale.skip);
}

void Sgd::update_in_fp32(const Views& views, bool decay, double lr, const Scale& scale) const {
  constexpr int64_t block = 1 << 18;  // elements, of which there are some copies
  if (scale.skip && scale.skip->item<float>() == 1) return;
  for (size_t i = 0; i < views.master.size(); ++i) {
    const at::Tensor &master = views.master[i], &gradient = views.grad[i];
    for (int64_t begin = 0; begin < master.numel(); begin += block) {
      const int64_t size = std::min(block, master.numel() - begin);
      const auto values = [&](const at::Tensor& of) { return of.narrow(0, begin, size).to(at::kFloat); };
      const at::Tensor before = values(master);
      at::Tensor way = values(gradient);
      if (scale.divisor) way = way / *scale.divisor;
      if (decay && options_.weight_decay != 0) way = way.add(before, options_.weight_decay);
      if (options_.momentum != 0) {
        const at::Tensor& kept = views.state[0][i];
        const at::Tensor buffer = values(kept).mul_(options_.momentum).add_(way);
        kept.narrow(0, begin, size).copy_(buffer);
        way = options_.nesterov ? way.add(buffer, options_.momentum) : buffer;
      }
      master.narrow(0, begin, size).copy_(before.sub(way, lr));
    }
  }
}

}  // namespace tesserae::optim
