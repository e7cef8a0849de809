#include "bench/plain_adamw.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

namespace tesserae::bench {

PlainAdamW::PlainAdamW(torch::nn::Module& model, c10::ScalarType compute, const optim::AdamWOptions& options)
    : options_(options) {
  const at::NoGradGuard no_grad;
  decaying_.weight_decay = options.weight_decay;
  for (const auto& item : model.named_parameters()) {
    at::Tensor parameter = item.value();
    Part& part = options.decays(item.key(), parameter.sizes().vec()) ? decaying_ : rest_;
    part.masters.push_back(parameter.detach());
    if (parameter.scalar_type() != compute) parameter.set_data(parameter.detach().to(compute));
    part.parameters.push_back(parameter);
    part.first_moments.push_back(at::zeros_like(part.masters.back()));
    part.second_moments.push_back(at::zeros_like(part.masters.back()));
    part.steps.push_back(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(parameter.device())));
  }
}

void PlainAdamW::step() {
  update(decaying_);
  update(rest_);
}

void PlainAdamW::update(Part& part) {
  if (part.parameters.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < part.parameters.size(); ++i) {
    gradients.push_back(part.parameters[i].grad().to(part.masters[i].scalar_type()));
    part.steps[i].add_(1);
  }
  at::_fused_adamw_(part.masters, gradients, part.first_moments, part.second_moments, /*max_exp_avg_sqs=*/{},
                    part.steps, options_.lr, options_.beta1, options_.beta2, part.weight_decay, options_.eps,
                    /*amsgrad=*/false,
                    /*maximize=*/false);
  for (size_t i = 0; i < part.parameters.size(); ++i) {
    if (!part.parameters[i].is_alias_of(part.masters[i])) part.parameters[i].copy_(part.masters[i]);
  }
}

void PlainAdamW::zero_grad() {
  for (Part* part : {&decaying_, &rest_}) {
    for (auto& parameter : part->parameters) parameter.mutable_grad().reset();
  }
}

}  // namespace tesserae::bench
