#include "tesserae/autograd/saving.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/offload/saved_version.h"

namespace tesserae::autograd {
namespace {

using torch::autograd::SavedVariableHooks;

thread_local std::weak_ptr<Saving> the_saving;

class Hooks final : public SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<Saving> saving) : saving_(std::move(saving)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    give_back_ = saving_->save(tensor);
    saving_ = nullptr;
    // Detached: the node that saves its own output would keep itself alive. A leaf knows no node, and its hooks do.
    if (give_back_) return;
    kept_ = tensor.is_leaf() ? tensor : tensor.detach();
    version_ = offload::SavedVersion(tensor);
  }

  at::Tensor call_unpack_hook() override {
    if (give_back_) return give_back_();
    version_.require_unchanged(kept_);
    return kept_;
  }

 private:
  std::shared_ptr<Saving> saving_;
  std::function<at::Tensor()> give_back_;
  at::Tensor kept_;
  offload::SavedVersion version_;
};

using torch::autograd::Engine;
using torch::autograd::variable_list;

/// How torch's engine takes the node at which a graph task begins: up to 2.12 by a std::shared_ptr.
template <typename Method>
struct RootOf;
template <typename Result, typename Task, typename Root, typename Input>
struct RootOf<Result (Engine::*)(Task, Root, Input)> {
  using type = Root;
};
using RootPointer = RootOf<decltype(&Engine::execute_with_graph_task)>::type;

/// Answers what torch asks an engine when it saves a tensor. Backwards run on torch's engine, whose threads there are
/// once a process.
class SavingEngine final : public Engine {
 public:
  ~SavingEngine() override { stop(); }

  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, RootPointer root,
      torch::autograd::InputBuffer&& input) override {
    return get_base_engine().execute_with_graph_task(task, std::move(root), std::move(input));
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto saving = the_saving.lock();
    if (saving == nullptr || in_backward()) return nullptr;
    return std::make_unique<Hooks>(std::move(saving));
  }
};

Engine& saving_engine() {
  static SavingEngine engine;
  return engine;
}

void install() {
  if (&Engine::get_default_engine() != &Engine::get_base_engine()) {
    throw InvalidArgument("set_saving",
                          "this process has Python's autograd engine: use torch.autograd.graph.saved_tensors_hooks");
  }
  torch::autograd::set_default_engine_stub(&saving_engine);
}

}  // namespace

std::weak_ptr<Saving> set_saving(std::weak_ptr<Saving> saving) {
  static const bool installed = (install(), true);
  (void)installed;
  return std::exchange(the_saving, std::move(saving));
}

}  // namespace tesserae::autograd
