#include "tesserae/comm/membership.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/os/seconds.h"

namespace tesserae::bindings {

void bind_membership(py::module_& module) {
  using comm::Membership;
  using os::milliseconds;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Membership>(module, "Membership", "What our launcher and this rank tell each other; comm/membership.h.")
      .def(py::init([] { return std::make_unique<Membership>(mesh::World::from_environment().launch(), true); }),
           without_gil, "As the environment says. IoError if the launcher is not reached.")
      .def_property_readonly("served", &Membership::served, "Whether the launcher is ours.")
      .def_property_readonly("epoch", &Membership::epoch)
      .def_property_readonly("ranks", &Membership::ranks)
      .def_property_readonly("rank", &Membership::rank)
      .def_property_readonly("has_place", &Membership::has_place)
      .def_property_readonly("is_of_those_left", &Membership::is_of_those_left)
      .def(
          "next_epoch",
          [](Membership& self, const std::vector<int>& missing, double deadline) {
            return self.next_epoch(missing, milliseconds(deadline));
          },
          py::arg("missing"), py::arg("deadline"), without_gil,
          "After a loss: waits until the launcher begins the next epoch. False: there is none.")
      .def(
          "wait_for_epoch",
          [](Membership& self, double deadline) { return self.wait_for_epoch(milliseconds(deadline)); },
          py::arg("deadline"), without_gil, "The same after ask_for_ranks().")
      .def("ask_for_ranks", &Membership::ask_for_ranks, py::arg("ranks"), without_gil)
      .def("is_over", &Membership::is_over, without_gil)
      .def("remember", &Membership::remember, py::arg("key"), py::arg("value"), without_gil)
      .def("remembered", &Membership::remembered, py::arg("key"), without_gil)
      .def(
          "meet",
          [](Membership& self, double connect_deadline, double deadline) {
            comm::FabricOptions options;
            options.connect_deadline = milliseconds(connect_deadline);
            options.deadline = milliseconds(deadline);
            options.epoch = self.epoch();
            options.cancelled = [&self] { return self.is_over(); };
            return comm::Fabric::connect(self.world(), options);
          },
          py::arg("connect_deadline"), py::arg("deadline"), py::keep_alive<0, 1>(), without_gil,
          "Collective: the ranks of this epoch meet. CommError if one is lost meanwhile.");
}

}  // namespace tesserae::bindings
