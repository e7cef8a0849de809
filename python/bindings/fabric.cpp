#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>

#include "python/bindings/bindings.h"
#include "tesserae/comm/give_up.h"
#include "tesserae/comm/meeting_store.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/os/seconds.h"

namespace tesserae::bindings {
namespace {

// A process group of torch's, of which the engine uses the backend of its device. Python makes it, on the thread that
// asks for a group. What holds the function may end on a thread without the GIL.
auto backends_of(py::function make_group) {
  const auto held = std::shared_ptr<py::function>(new py::function(std::move(make_group)), [](py::function* function) {
    if (Py_IsInitialized() == 0) return;  // the interpreter has taken it along
    const py::gil_scoped_acquire gil;
    delete function;
  });
  return [held](const comm::DeviceGroup& group) {
    const py::gil_scoped_acquire gil;
    const py::object made = (*held)(group.members, static_cast<double>(group.deadline.count()) / 1e3);
    return made.cast<c10::intrusive_ptr<c10d::ProcessGroup>>()->getBackend(group.device.type());
  };
}

}  // namespace

void bind_fabric(py::module_& module) {
  using comm::Fabric;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  using os::milliseconds;

  py::class_<comm::Counters>(module, "Counters", "What has left this rank through its groups.")
      .def("bytes", &comm::Counters::bytes);

  py::class_<Fabric, std::shared_ptr<Fabric>>(module, "Fabric", "The live connections of this rank in a job.")
      .def_static(
          "join",
          [](c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool served, const std::string& backend,
             const at::Device& device, double connect_deadline, double deadline,
             std::optional<py::function> make_group) {
            comm::FabricOptions options;
            if (make_group) options.make_backend = backends_of(*std::move(make_group));
            options.backend = backend;
            options.device = device;
            options.connect_deadline = milliseconds(connect_deadline);
            options.deadline = milliseconds(deadline);
            const py::gil_scoped_release without_gil;
            return Fabric::join(std::move(store), rank, size, served, options);
          },
          py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("served"), py::arg("backend"),
          py::arg("device"), py::arg("connect_deadline"), py::arg("deadline"), py::arg("make_group") = py::none(),
          "Collective: the ranks that share `store` meet. Deadlines in seconds. `make_group` makes a process group of "
          "torch's of these ranks in this order, with this deadline: for devices other than the CPU and CUDA.")
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
      .def("counters", &Fabric::counters)
      .def("leave", &Fabric::leave, without_gil, "Says goodbye before the process ends.")
      .def("give_up", &comm::give_up, without_gil,
           "Leaves what is broken, for a process that goes on: nothing blocks in it any more, and no verb is called.")
      .def("missing_ranks", &comm::missing_ranks, without_gil,
           "Ranks, as they joined, for which others waited when operations failed at their deadline.")
      .def("watched_store", &comm::watched_store, py::arg("prefix"), without_gil,
           "A part of the store through which the ranks met, whose waits end when one is lost. None: there is none.");

  py::class_<comm::MeshFabric, std::shared_ptr<comm::MeshFabric>>(
      module, "MeshFabric", "The job's fabric seen through its mesh; see tesserae/comm/mesh_fabric.h. Axes as of Mesh.")
      .def(py::init<std::shared_ptr<Fabric>, const mesh::Mesh&>(), py::arg("job"), py::arg("mesh"))
      .def_property_readonly("job", &comm::MeshFabric::job)
      .def_property_readonly("mesh", &comm::MeshFabric::mesh)
      .def(
          "over", [](comm::MeshFabric& self, const std::string& axes) { return self.over(axes_named(axes)); },
          py::arg("axes"), "The fabric of the ranks that differ from this one on these axes only. The same each time.");
}

}  // namespace tesserae::bindings
