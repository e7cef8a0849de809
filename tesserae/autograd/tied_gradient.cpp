#include "tesserae/autograd/tied_gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "tesserae/autograd/node.h"
#include "tesserae/base/error.h"

namespace tesserae::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct KeepGradient : torch::autograd::Function<KeepGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& parameter, const TiedGradientPtr& tied) {
    keep(context, tied);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return parameter.alias();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) return {gradients[0], {}};
    const auto tied = kept<TiedGradient>(context, "tied parameters have");
    tied->gradient_ = gradients[0];
    return {{}, {}};
  }
};

at::Tensor TiedGradient::first(const TiedGradientPtr& tied, const at::Tensor& parameter) {
  if (!tied) {
    throw InvalidArgument("TiedGradient::first",
                          "there is none; make one in each forward and give it to the embedding");
  }
  const bool expected = tied->parameter_ == parameter.unsafeGetTensorImpl();
  return expected ? KeepGradient::apply(parameter, tied) : parameter.view_as(parameter);
}

at::Tensor tied_leaf(const at::Tensor& tensor) {
  const auto node = tensor.grad_fn();
  if (dynamic_cast<torch::autograd::CppNode<KeepGradient>*>(node.get()) == nullptr) return tensor;
  const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get());
  return leaf == nullptr ? tensor : leaf->variable;
}

}  // namespace tesserae::autograd
