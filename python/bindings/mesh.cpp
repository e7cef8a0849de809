#include "tesserae/mesh/layout.h"

#include <pybind11/stl.h>

#include <tuple>

#include "python/bindings/bindings.h"

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
}

}  // namespace tesserae::bindings
