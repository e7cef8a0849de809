#include "tesserae/autograd/gradient_hooks.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tesserae/autograd/tied_gradient.h"

namespace tesserae::autograd {
namespace {

using torch::autograd::variable_list;

struct Watcher {
  GradientHooks::Take take;
  GradientHooks::Destination destination;
  std::vector<at::Tensor> parameters;
};

class TakeGradient : public torch::autograd::FunctionPostHook {
 public:
  TakeGradient(std::weak_ptr<Watcher> watcher, int index) : watcher_(std::move(watcher)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    const auto watcher = watcher_.lock();
    if (watcher == nullptr) return outputs;
    at::Tensor& slot = watcher->parameters[static_cast<size_t>(index_)].mutable_grad();
    if (!slot.defined()) return outputs;
    const at::NoGradGuard no_grad;
    const at::Tensor gradient = std::move(slot);
    slot = at::Tensor();
    watcher->take(index_, gradient);
    return outputs;
  }

  at::Tensor destination() const {
    const auto watcher = watcher_.lock();
    return watcher == nullptr ? at::Tensor() : watcher->destination(index_);
  }

 private:
  std::weak_ptr<Watcher> watcher_;
  int index_;
};

// Buffers belong to the stream on which gradients are accumulated, that of the time of sharding.
bool on_current_stream(torch::autograd::Node& node) {
  const auto stream = node.stream();
  return !stream || c10::impl::VirtualGuardImpl(stream->device_type()).getStream(stream->device()) == *stream;
}

}  // namespace

struct GradientHooks::Impl {
  using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::shared_ptr<Watcher> watcher;
  std::vector<NodePointer> nodes;
};

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, Take take, Destination destination)
    : impl_(std::make_unique<Impl>()) {
  impl_->watcher = std::make_shared<Watcher>(Watcher{std::move(take), std::move(destination), parameters});
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters[i]);
    node->add_post_hook(std::make_unique<TakeGradient>(impl_->watcher, static_cast<int>(i)));
    impl_->nodes.push_back(std::move(node));
  }
}

GradientHooks::~GradientHooks() = default;

at::Tensor gradient_destination(const at::Tensor& given) {
  const at::Tensor parameter = tied_leaf(given);
  if (!parameter.is_leaf() || !parameter.requires_grad() || parameter.grad().defined()) return {};
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!node || node->post_hooks().size() != 1) return {};
  const auto* ours = dynamic_cast<const TakeGradient*>(node->post_hooks().front().get());
  const bool seen =
      !node->pre_hooks().empty() || !node->tensor_pre_hooks().empty() || node->tensor_post_acc_grad_hooks() != nullptr;
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  const bool captured = asked_for == nullptr || !asked_for->empty() || at::GradMode::is_enabled();
  if (ours == nullptr || seen || captured || !on_current_stream(*node)) return {};
  return ours->destination();
}

}  // namespace tesserae::autograd
