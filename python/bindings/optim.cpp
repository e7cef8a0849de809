#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/optim/bad_steps.h"
#include "tesserae/optim/clip.h"
#include "tesserae/optim/whole_matrices.h"

namespace tesserae::bindings {

void bind_optim(py::module_& module) {
  using optim::WholeMatrices;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<WholeMatrices>(module, "WholeMatrices",
                            "Matrices that ranks hold by rows, brought whole to one rank each and back; see "
                            "tesserae/optim/whole_matrices.h.")
      .def(py::init([](comm::Fabric& fabric, int degree, const std::vector<std::pair<int64_t, int64_t>>& shapes) {
             std::vector<WholeMatrices::Shape> all;
             for (const auto& [rows, columns] : shapes) all.push_back({rows, columns});
             const mesh::Layout layout(fabric.size(), {degree, degree, degree});
             comm::Group& group = fabric.group(layout.parameter_group(fabric.rank()), comm::Traffic::control);
             return std::make_unique<WholeMatrices>(group, std::move(all));
           }),
           py::arg("fabric"), py::arg("degree"), py::arg("shapes"), py::keep_alive<1, 2>(), without_gil,
           "Collective over the `degree` ranks that share rows with this one.")
      .def_property_readonly("owners", &WholeMatrices::owners, "By matrix: which of these ranks gets it.")
      .def_property_readonly("imbalance", &WholeMatrices::imbalance)
      .def("collect", &WholeMatrices::collect, py::arg("rows"), without_gil,
           "The matrices of this rank, in order, from the rows that all ranks bring. Collective.")
      .def(
          "distribute",
          [](const WholeMatrices& self, const std::vector<at::Tensor>& whole, const at::Tensor& like) {
            return self.distribute(whole, like.options());
          },
          py::arg("whole"), py::arg("like"), without_gil,
          "This rank's rows of all matrices, from those that the ranks own. Collective.");
  py::class_<optim::BadSteps>(module, "BadSteps", "Which steps are bad; see tesserae/optim/bad_steps.h.")
      .def(py::init<std::optional<double>>(), py::arg("loss_spike"))
      .def("judge", &optim::judge, py::arg("fabric"), py::arg("loss"), py::arg("norm"), py::arg("overflow_expected"),
           without_gil, "Collective.")
      .def_property_readonly("in_a_row", &optim::BadSteps::in_a_row)
      .def_property_readonly("description", [](const optim::BadSteps& self) { return self.description().dump(); })
      .def(
          "take_over",
          [](optim::BadSteps& self, const std::string& text) {
            try {
              self.take_over(nlohmann::json::parse(text));
            } catch (const nlohmann::json::exception& error) {
              throw InvalidArgument("BadSteps.load_state_dict", error.what());
            }
          },
          py::arg("description"));
  module.def(
      "clip_gradients",
      [](Unit& unit, double max_norm, double norm_type, const std::vector<at::Tensor>& whole) {
        const at::NoGradGuard no_grad;
        auto& engine = unit.engine();
        engine.take_gradients();
        const auto target = optim::target_of(engine);
        double norm = optim::global_norm(*target, norm_type);
        const bool most = std::isinf(norm_type);
        for (const at::Tensor& gradient : whole) {
          const auto precise = c10::promoteTypes(gradient.scalar_type(), at::kFloat);  // as torch: not that of bf16
          const double other =
              at::linalg_vector_norm(gradient, norm_type, std::nullopt, /*keepdim=*/false, precise).item<double>();
          norm = most ? (std::isnan(other) ? other : std::max(norm, other))  // max would drop it
                      : std::pow(std::pow(norm, norm_type) + std::pow(other, norm_type), 1 / norm_type);
        }
        if (most) norm = target->max_over_chunks(norm);  // as torch: of those, too
        // As torch.nn.utils.clip_grad_norm_ has it: a norm that is not finite makes the gradients so.
        const double coefficient = max_norm / (norm + 1e-6);
        if (!(coefficient >= 1.0)) {
          for (auto& shard : engine.shards()) {
            if (shard.grad.defined()) shard.grad.mul_(coefficient);
          }
          for (const at::Tensor& gradient : whole) gradient.mul_(coefficient);
        }
        engine.show_gradients();
        return norm;
      },
      py::arg("unit"), py::arg("max_norm"), py::arg("norm_type"), py::arg("whole"),
      py::call_guard<py::gil_scoped_release>(),
      "Collective: scales the gradients of the unit's engine, and `whole` of each rank, to this norm at most together; "
      "returns the norm that they had.");
}

}  // namespace tesserae::bindings
