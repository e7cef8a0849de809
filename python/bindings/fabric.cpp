#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "python/bindings/bindings.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/comm/sub_fabric.h"

namespace tesserae::bindings {

void bind_fabric(py::module_& module) {
  using comm::Fabric;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  const auto milliseconds = [](double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  };

  py::class_<comm::Counters>(module, "Counters", "What has left this rank through its groups.")
      .def("bytes", &comm::Counters::bytes);

  py::class_<Fabric, std::shared_ptr<Fabric>>(module, "Fabric", "The live connections of this rank in a job.")
      .def_static(
          "join",
          [milliseconds](c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool served,
                         const std::string& backend, const at::Device& device, double connect_deadline,
                         double deadline) {
            comm::FabricOptions options;
            options.backend = backend;
            options.device = device;
            options.connect_deadline = milliseconds(connect_deadline);
            options.deadline = milliseconds(deadline);
            return Fabric::join(std::move(store), rank, size, served, options);
          },
          py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("served"), py::arg("backend"),
          py::arg("device"), py::arg("connect_deadline"), py::arg("deadline"), without_gil,
          "Collective: the ranks that share `store` meet. Deadlines in seconds.")
      .def_static(
          "null",
          [](int rank, int size, const at::Device& device) {
            return Fabric::null(mesh::World::single_host(rank, size), device);
          },
          py::arg("rank"), py::arg("size"), py::arg("device"), "A fabric that moves nothing.")
      .def_property_readonly("rank", &Fabric::rank, "This process's rank in the order of hosts.")
      .def_property_readonly("size", &Fabric::size)
      .def_property_readonly("hosts", [](const Fabric& self) { return self.world().hosts(); })
      .def(
          "host_ranks", [](const Fabric& self, int rank) { return self.world().host_ranks(rank); }, py::arg("rank"),
          "The ranks on the host of `rank`.")
      .def(
          "joined_rank", [](const Fabric& self, int rank) { return self.world().launcher_rank(rank); }, py::arg("rank"),
          "Which rank among those that joined is `rank` in the order of hosts.")
      .def(
          "of_ranks",
          [](const std::shared_ptr<Fabric>& self, const std::vector<int>& members) {
            return comm::sub_fabric(self, members);
          },
          py::arg("members"), "What these ranks, ascending and this one among them, have of it: a fabric of their own.")
      .def("counters", &Fabric::counters)
      .def("leave", &Fabric::leave, without_gil, "Says goodbye before the process ends.");
}

}  // namespace tesserae::bindings
