#include "tesserae/mesh/layout.h"

#include <pybind11/stl.h>

#include <tuple>

#include "python/bindings/bindings.h"
#include "tesserae/mesh/axes.h"
#include "tesserae/mesh/split.h"

namespace tesserae::bindings {
namespace {

using Triple = std::tuple<int, int, int>;  // parameters, gradients, optimizer

mesh::Layout layout_of(int ranks, const Triple& d) {
  return {ranks, {std::get<0>(d), std::get<1>(d), std::get<2>(d)}};
}

}  // namespace

void bind_mesh(py::module_& module) {
  module.def(
      "all_degrees",
      [](int ranks) {
        std::vector<Triple> all;
        for (const auto& d : mesh::all_degrees(ranks)) all.emplace_back(d.parameters, d.gradients, d.optimizer);
        return all;
      },
      py::arg("ranks"), "Every valid (parameters, gradients, optimizer) for so many ranks.");
  module.def(
      "check_degrees", [](int ranks, Triple d) { layout_of(ranks, d); }, py::arg("ranks"), py::arg("degrees"),
      "Raises InvalidArgument, naming the nearest valid ones, for degrees that do not fit.");
  module.def(
      "parameter_group", [](int ranks, Triple d, int rank) { return layout_of(ranks, d).parameter_group(rank); },
      py::arg("ranks"), py::arg("degrees"), py::arg("rank"), "The ranks that together hold all parameter pieces.");
  module.def(
      "replica_group", [](int ranks, Triple d, int rank) { return layout_of(ranks, d).replica_group(rank); },
      py::arg("ranks"), py::arg("degrees"), py::arg("rank"), "The ranks that hold the same chunk.");

  module.def(
      "tensor_group", [](int ranks, int degree, int rank) { return mesh::Axes(ranks, degree).tensor_group(rank); },
      py::arg("ranks"), py::arg("tensor_degree"), py::arg("rank"),
      "The ranks that hold the parts of split tensors together, by tensor index. Raises InvalidArgument, naming the "
      "nearest degrees that would do.");
  module.def(
      "data_group", [](int ranks, int degree, int rank) { return mesh::Axes(ranks, degree).data_group(rank); },
      py::arg("ranks"), py::arg("tensor_degree"), py::arg("rank"), "The ranks that share the tensor index of `rank`.");

  using mesh::Split;
  py::class_<Split>(module, "Split", "How a tensor is cut among tensor-parallel ranks; see tesserae/mesh/split.h.")
      .def(py::init([](int dim, int parts, int index, int blocks) {
             return Split{dim, parts, index, blocks};
           }),
           py::arg("dim") = 0, py::arg("parts") = 1, py::arg("index") = 0, py::arg("blocks") = 1)
      .def_readonly("dim", &Split::dim)
      .def_readonly("parts", &Split::parts)
      .def_readonly("index", &Split::index)
      .def_readonly("blocks", &Split::blocks)
      .def(
          "part_shape",
          [](const Split& self, const std::vector<int64_t>& whole) { return mesh::part_shape(whole, self); },
          py::arg("whole"), "The shape of one part, padding included. Raises InvalidArgument where it can not be cut.")
      .def("__eq__", [](const Split& a, const Split& b) { return a == b; })
      .def("__repr__", [](const Split& self) { return mesh::to_string(self); });
}

}  // namespace tesserae::bindings
