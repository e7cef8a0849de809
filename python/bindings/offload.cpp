#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "tesserae/offload/activations.h"

namespace tesserae::bindings {

void bind_offload(py::module_& module) {
  using offload::ActivationCounters;
  using offload::Activations;
  using offload::Saved;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<ActivationCounters>(module, "ActivationCounters", "Bytes; see tesserae/offload/activations.h.")
      .def_readonly("passes", &ActivationCounters::passes,
                    "Forwards whose backward has begun; several forwards before one backward are one pass.")
      .def_readonly("bytes_out", &ActivationCounters::out, "Of storages that left.")
      .def_readonly("bytes_in", &ActivationCounters::in, "Of storages that came back.")
      .def_readonly("bytes_stayed", &ActivationCounters::stayed,
                    "Of those that would have left, but are needed within the horizon of the end of the forward.")
      .def_readonly("bytes_away", &ActivationCounters::away, "Of those that are away now.")
      .def_readonly("most_bytes_away", &ActivationCounters::most_away, "The most that were away at a time.")
      .def_readonly("seconds_waited", &ActivationCounters::waited,
                    "In which the thread that computes copied, or waited for what it needs.");

  py::class_<Saved, std::shared_ptr<Saved>>(module, "Saved", "Stands for a tensor that was saved.")
      .def("take", &Saved::take, without_gil);

  py::class_<Activations, std::shared_ptr<Activations>>(
      module, "Activations", "Where activations are between forward and backward; see tesserae/offload/activations.h.")
      .def(py::init([](int horizon, const std::string& folder, int64_t smallest) {
             return Activations::make({.horizon = horizon, .smallest = smallest, .folder = folder});
           }),
           py::kw_only(), py::arg("horizon"), py::arg("folder"),
           py::arg("smallest") = offload::ActivationOptions().smallest)
      .def("put", &Activations::put, py::arg("tensor"), without_gil, "None: it stays.")
      .def_property_readonly("inside", &Activations::inside, "Whether a unit is in its forward.")
      .def_property_readonly("counters", &Activations::counters)
      .def_property_readonly("forecast", &Activations::forecast,
                             "Bytes that leave in a forward like the last that had its backward.")
      .def_property_readonly("shelf", &Activations::shelf, "Where they go; empty before anything went.");
}

}  // namespace tesserae::bindings
