#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "tesserae/base/error.h"
#include "tesserae/experts/dispatch.h"
#include "tesserae/experts/grouped_linear.h"

namespace tesserae::bindings {
namespace {

using experts::Dispatch;
using Plan = std::shared_ptr<const Dispatch>;

/// Choices of a router that is not ours: of what kind, and in which range, is checked here.
Plan plan(const at::Tensor& choice, int64_t experts, comm::MeshFabric& mesh) {
  if (choice.dim() != 2 || choice.scalar_type() != at::kLong) {
    throw InvalidArgument("plan_dispatch", cat("choices of shape ", choice.sizes(), " and ",
                                               c10::toString(choice.scalar_type()), "; pass [tokens, k] int64"));
  }
  const at::Tensor all = choice.detach().flatten();
  if (all.numel() > 0) {
    const auto [least, most] = all.aminmax();
    const int64_t low = least.item<int64_t>(), high = most.item<int64_t>();
    if (low < 0 || high >= experts) {
      throw InvalidArgument("plan_dispatch", cat("a router has chosen expert ", low < 0 ? low : high, " of ", experts,
                                                 "; they count from 0"));
    }
  }
  const at::Tensor chosen = at::zeros({experts}, all.options()).scatter_add_(0, all, at::ones_like(all));
  return experts::plan_dispatch(choice.detach().contiguous(), chosen, /*capacity_factor=*/0, mesh);
}

}  // namespace

// Nodes run their backward in C++, on threads of autograd that hold no GIL.
void bind_experts(py::module_& module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Dispatch, std::shared_ptr<Dispatch>>(module, "Dispatch",
                                                  "Where the rows of a forward go; see tesserae/experts/dispatch.h.")
      .def_readonly("counts", &Dispatch::counts, "[experts of this rank] int64, on the host: rows of each.");
  module.def(
      "plan_dispatch",
      [](const at::Tensor& choice, int64_t experts, const std::shared_ptr<comm::MeshFabric>& mesh) {
        return std::const_pointer_cast<Dispatch>(plan(choice, experts, *mesh));
      },
      py::arg("choice"), py::arg("experts"), py::arg("mesh"), py::keep_alive<0, 3>(), without_gil,
      "choice [tokens, k] int64: the experts of each token, of `experts` in all; nothing is dropped. Collective over "
      "the expert axis, as the two functions below are, forward and backward. Raises InvalidArgument.");
  module.def(
      "dispatch", [](const at::Tensor& x, const std::shared_ptr<Dispatch>& plan) { return experts::dispatch(x, plan); },
      py::arg("x"), py::arg("plan"), without_gil,
      "The rows [sum of counts, width] that this rank's experts work on, by expert, for x [tokens, width].");
  module.def(
      "combine",
      [](const at::Tensor& rows, const at::Tensor& weights, const std::shared_ptr<Dispatch>& plan) {
        return experts::combine(rows, weights, plan);
      },
      py::arg("rows"), py::arg("weights"), py::arg("plan"), without_gil,
      "The reverse: for each token the sum of its rows, times weights [tokens, k].");
  module.def(
      "grouped_linear", &experts::grouped_linear, py::arg("x"), py::arg("weight"), py::arg("counts"), without_gil,
      "y = x W_g^T for rows x [rows, in] that are ordered by group, weight [groups, out, in], counts [groups] on "
      "the host.");
  module.def("experts_of_rank", &experts::experts_of_rank, py::arg("experts"), py::arg("degree"),
             "experts / degree. Raises InvalidArgument, naming the degrees that would do.");
}

}  // namespace tesserae::bindings
