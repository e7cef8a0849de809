#include "tesserae/mesh/layout.h"

#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "python/bindings/bindings.h"
#include "tesserae/base/error.h"
#include "tesserae/mesh/mesh.h"
#include "tesserae/mesh/split.h"
#include "tesserae/mesh/strategy.h"
#include "tesserae/mesh/world.h"

namespace tesserae::bindings {
namespace {

using Triple = std::tuple<int, int, int>;  // parameters, gradients, optimizer

mesh::Layout layout_of(int ranks, const Triple& d) {
  return {ranks, {std::get<0>(d), std::get<1>(d), std::get<2>(d)}};
}

}  // namespace

mesh::AxisSet axes_named(const std::string& name) {
  namespace axes = mesh::axes;
  const std::pair<const char*, mesh::AxisSet> sets[] = {{"state", axes::state},
                                                        {"expert_state", axes::expert_state},
                                                        {"batch", axes::batch},
                                                        {"loss", axes::loss},
                                                        {"job", axes::job}};
  for (const auto& [known, set] : sets) {
    if (name == known) return set;
  }
  if (const auto axis = mesh::axis_from_name(name)) return *axis;
  throw InvalidArgument("Mesh", cat("there are no axes '", name, "'"));
}

void bind_mesh(py::module_& module) {
  py::class_<mesh::Launch>(module, "Launch", "What the launcher told this process; see tesserae/mesh/launch.h.")
      .def(py::init([] { return mesh::World::from_environment().launch(); }))
      .def_readonly("rank", &mesh::Launch::rank)
      .def_readonly("size", &mesh::Launch::size)
      .def_readonly("local_rank", &mesh::Launch::local_rank)
      .def_readonly("local_size", &mesh::Launch::local_size)
      .def_readonly("address", &mesh::Launch::address)
      .def_readonly("port", &mesh::Launch::port)
      .def_readonly("served", &mesh::Launch::store_is_served, "By the launcher.");
  module.def(
      "all_degrees",
      [](int ranks) {
        std::vector<Triple> all;
        for (const auto& d : mesh::all_degrees(ranks)) all.emplace_back(d.parameters, d.gradients, d.optimizer);
        return all;
      },
      py::arg("ranks"), "Every valid (parameters, gradients, optimizer) for so many ranks.");
  module.def(
      "parameter_group", [](int ranks, Triple d, int rank) { return layout_of(ranks, d).parameter_group(rank); },
      py::arg("ranks"), py::arg("degrees"), py::arg("rank"), "The ranks that together hold all parameter pieces.");
  module.def(
      "replica_group", [](int ranks, Triple d, int rank) { return layout_of(ranks, d).replica_group(rank); },
      py::arg("ranks"), py::arg("degrees"), py::arg("rank"), "The ranks that hold the same chunk.");

  module.def(
      "chunk", [](int ranks, Triple d, int rank) { return layout_of(ranks, d).chunk(rank); }, py::arg("ranks"),
      py::arg("degrees"), py::arg("rank"), "Which of the chunks of the masters the rank holds.");

  using mesh::Strategy;
  py::class_<Strategy>(module, "Strategy", "Three degrees and two lifetimes; see tesserae/mesh/strategy.h.")
      .def(py::init([](const std::string& name, int ranks, int hybrid_shard_degree, const std::optional<Triple>& d) {
             std::optional<mesh::Degrees> degrees;
             if (d) degrees = {std::get<0>(*d), std::get<1>(*d), std::get<2>(*d)};
             return mesh::resolve({name, hybrid_shard_degree, degrees}, ranks);
           }),
           py::arg("name"), py::arg("ranks"), py::kw_only(), py::arg("hybrid_shard_degree") = 0,
           py::arg("degrees") = std::nullopt,
           "What a script asks for by name, and a configuration by degrees, for so many ranks. Raises InvalidArgument, "
           "naming what would be valid.")
      .def_property_readonly("degrees",
                             [](const Strategy& self) {
                               const mesh::Degrees& d = self.degrees;
                               return Triple{d.parameters, d.gradients, d.optimizer};
                             })
      .def_readonly("free_after_forward", &Strategy::free_after_forward)
      .def_readonly("free_after_backward", &Strategy::free_after_backward)
      .def("closest_preset", &mesh::closest_preset, py::arg("ranks"), "The one of FSDP's names that comes closest.")
      .def("__eq__", [](const Strategy& a, const Strategy& b) { return a == b; });

  using mesh::Mesh;
  py::class_<Mesh>(
      module, "Mesh",
      "The ranks of a job as a grid of axes; see tesserae/mesh/mesh.h. Axes are asked for by name: tensor, "
      "context, data, expert, expert_data, or what they are for: state, expert_state, batch, loss, job.")
      .def(py::init([](int ranks, int tensor, int context, int expert) {
             return Mesh(ranks, {.tensor = tensor, .context = context, .expert = expert});
           }),
           py::arg("ranks"), py::kw_only(), py::arg("tensor") = 1, py::arg("context") = 1, py::arg("expert") = 1,
           "Raises InvalidArgument, naming the nearest degrees that would do, for those that do not divide.")
      .def_property_readonly("ranks", &Mesh::ranks)
      .def(
          "degree", [](const Mesh& self, const std::string& axes) { return self.degree(axes_named(axes)); },
          py::arg("axes"), "How many ranks differ on these axes only.")
      .def(
          "index",
          [](const Mesh& self, const std::string& axes, int rank) { return self.index(axes_named(axes), rank); },
          py::arg("axes"), py::arg("rank"), "In [0, degree).")
      .def(
          "members",
          [](const Mesh& self, const std::string& axes, int rank) { return self.members(axes_named(axes), rank); },
          py::arg("axes"), py::arg("rank"), "The ranks that differ from `rank` on these axes only, by index.")
      .def("writes_unsplit", &Mesh::writes_unsplit, py::arg("rank"),
           "What no split cuts is the same on all ranks of a tensor group; one of them counts, sends or writes it.")
      .def("__eq__", [](const Mesh& a, const Mesh& b) { return a == b; })
      .def("__repr__", [](const Mesh& self) { return mesh::to_string(self); });

  using mesh::Split;
  using mesh::Splits;
  py::class_<Split>(module, "Split", "How a tensor is cut among the ranks of an axis; see tesserae/mesh/split.h.")
      .def(py::init([](int dim, int parts, int index, int blocks, const std::string& axis) {
             const auto named = mesh::axis_from_name(axis);
             if (!named) throw InvalidArgument("Split", cat("there is no axis '", axis, "'"));
             return Split{dim, parts, index, blocks, *named};
           }),
           py::arg("dim") = 0, py::arg("parts") = 1, py::arg("index") = 0, py::arg("blocks") = 1,
           py::arg("axis") = "tensor")
      .def_readonly("dim", &Split::dim)
      .def_readonly("parts", &Split::parts)
      .def_readonly("index", &Split::index)
      .def_readonly("blocks", &Split::blocks)
      .def_property_readonly("axis", [](const Split& self) { return std::string(mesh::to_string(self.axis)); })
      .def("__eq__", [](const Split& a, const Split& b) { return a == b; })
      .def("__repr__", [](const Split& self) { return mesh::to_string(self); });

  py::class_<Splits>(module, "Splits",
                     "How a tensor is cut along the axes of a mesh: not at all, along one, or along two, the second "
                     "within the parts of the first; see tesserae/mesh/split.h.")
      .def(py::init<>(), "Whole.")
      .def(py::init<const Split&>(), py::arg("only"))
      .def(py::init<const Split&, const Split&>(), py::arg("first"), py::arg("second"))
      .def_property_readonly("whole", &Splits::whole, "Whether nothing is cut.")
      .def(
          "parts",
          [](const Splits& self, const std::string& axis) {
            const auto named = mesh::axis_from_name(axis);
            if (!named) throw InvalidArgument("Splits", cat("there is no axis '", axis, "'"));
            return self.along(*named).parts;
          },
          py::arg("axis"), "In how many parts it is cut along that axis; 1 where it is not.")
      .def(
          "part_shape",
          [](const Splits& self, const std::vector<int64_t>& whole) { return mesh::part_shape(whole, self); },
          py::arg("whole"), "The shape of one part, padding included. Raises InvalidArgument where it cannot be cut.")
      .def(
          "begins", [](const Splits& self, const std::vector<int64_t>& whole) { return part_begin(whole, self) == 0; },
          py::arg("whole"), "Whether this part has the first element of the whole tensor.")
      .def("__eq__", [](const Splits& a, const Splits& b) { return a == b; })
      .def("__repr__", [](const Splits& self) { return mesh::to_string(self); });
}

}  // namespace tesserae::bindings
