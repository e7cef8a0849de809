#include "tesserae/autograd/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace tesserae::autograd {

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void at_end_of_backward(std::function<void()> task) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(task));
}

}  // namespace tesserae::autograd
