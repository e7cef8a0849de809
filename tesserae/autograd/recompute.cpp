#include "tesserae/autograd/recompute.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>

#include "tesserae/autograd/node.h"
#include "tesserae/base/error.h"

namespace tesserae::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The states of the generators that `compute` may draw from: the host's, and the inputs' device's.
class RandomState {
 public:
  static RandomState capture(const std::vector<at::Tensor>& inputs) {
    RandomState state;
    state.add(at::kCPU);
    for (const auto& input : inputs) {
      if (input.defined() && !input.device().is_cpu()) {
        state.add(input.device());
        break;
      }
    }
    return state;
  }

  void restore() const {
    for (auto [generator, state] : entries_) generator.set_state(state);
  }

 private:
  void add(c10::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    entries_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, at::Tensor>> entries_;
};

struct RestoredAtEnd {
  RandomState state;
  ~RestoredAtEnd() { state.restore(); }
};

struct Recomputation {
  TensorFunction compute;
  std::vector<at::Tensor> others;  // inputs that are no floating point tensors, by position
  std::vector<size_t> taken_out;   // the positions of those that are: there, others is undefined
  RandomState random;
};

std::vector<at::Tensor> merge(const Recomputation& what, const variable_list& differentiable) {
  std::vector<at::Tensor> inputs = what.others;
  for (size_t i = 0; i < what.taken_out.size(); ++i) inputs[what.taken_out[i]] = differentiable[i];
  return inputs;
}

struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* context, std::shared_ptr<Recomputation> what, at::TensorList inputs) {
    // A TensorList, because Function::apply does not look for variables in a vector.
    // inputs[0] is a scalar that requires grad: without it an input that does not (embedding ids) would cut the graph.
    context->saved_data["what"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(what));
    context->save_for_backward(inputs.vec());
    const at::NoGradGuard no_grad;
    return what->compute(merge(*what, variable_list(inputs.begin() + 1, inputs.end())));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require_first_derivative("recomputed activations have");
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw InvalidArgument("backward",
                            "a unit that recomputes its activations has gradients of parameters in loss.backward() "
                            "only, not in torch::autograd::grad: switch that off with checkpoint_activations(false)");
    }
    const auto what = context->saved_data["what"].toCapsule();
    const Recomputation& recomputation = *static_cast<Holder*>(what.get())->what;
    const variable_list saved = context->get_saved_variables();

    variable_list leaves;
    for (size_t i = 1; i < saved.size(); ++i) {
      at::Tensor leaf = saved[i].detach();
      leaf.set_requires_grad(saved[i].requires_grad());
      leaves.push_back(std::move(leaf));
    }
    std::vector<at::Tensor> outputs;
    {
      const RestoredAtEnd now{RandomState::capture(leaves)};
      recomputation.random.restore();
      const at::AutoGradMode enable(true);
      outputs = recomputation.compute(merge(recomputation, leaves));
    }
    variable_list roots, root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);

    variable_list result{at::Tensor(), at::Tensor()};  // for `what` and for the scalar
    for (auto& leaf : leaves) result.push_back(leaf.grad());
    return result;
  }

  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<Recomputation> recomputation) : what(std::move(recomputation)) {}
    std::shared_ptr<Recomputation> what;
  };
};

}  // namespace

std::vector<at::Tensor> recompute_all_in_backward(const TensorFunction& compute,
                                                  const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return compute(inputs);
  auto what = std::make_shared<Recomputation>(Recomputation{compute, inputs, {}, RandomState::capture(inputs)});
  variable_list differentiable{at::zeros({}).set_requires_grad(true)};
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].is_floating_point()) continue;
    differentiable.push_back(inputs[i]);
    what->others[i] = at::Tensor();
    what->taken_out.push_back(i);
  }
  return Recompute::apply(what, at::TensorList(differentiable));
}

}  // namespace tesserae::autograd
