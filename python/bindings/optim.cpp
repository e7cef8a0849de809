#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/optim/clip.h"

namespace tesserae::bindings {

void bind_optim(py::module_& module) {
  module.def(
      "clip_gradients",
      [](Unit& unit, double max_norm, double norm_type) {
        const at::NoGradGuard no_grad;
        auto& engine = unit.engine();
        engine.take_gradients();
        const auto target = optim::target_of(engine);
        const double norm = optim::global_norm(*target, norm_type);
        // As torch.nn.utils.clip_grad_norm_ has it: a norm that is not finite makes the gradients so.
        const double coefficient = max_norm / (norm + 1e-6);
        if (!(coefficient >= 1.0)) {
          for (auto& shard : engine.shards()) {
            if (shard.grad.defined()) shard.grad.mul_(coefficient);
          }
        }
        engine.show_gradients();
        return norm;
      },
      py::arg("unit"), py::arg("max_norm"), py::arg("norm_type"), py::call_guard<py::gil_scoped_release>(),
      "Collective: scales the gradients of the unit's engine to this norm at most; returns the norm that they had.");
}

}  // namespace tesserae::bindings
