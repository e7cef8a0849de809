// tesserae_sim._C: what Python needs of the simulated accelerator beyond what torch asks any device for.

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "tests/sim/counters.h"
#include "tests/sim/device.h"
#include "tests/sim/generator.h"
#include "tests/sim/process_group.h"
#include "tests/sim/processes.h"

namespace tesserae::sim {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

void bind_errors(py::module_& module) {
  const py::handle base = PyExc_RuntimeError;
  py::register_exception<OrderMismatch>(module, "OrderMismatch", base);
  py::register_exception<NotEntered>(module, "NotEntered", base);
  py::register_exception<CollectiveTimeout>(module, "CollectiveTimeout", base);
  py::register_exception<DeviceFailure>(module, "DeviceFailure", base);
}

void bind_counters(py::module_& module) {
  py::class_<Counters>(module, "Counters", "What a device did; the difference of two is what it did between them.")
      .def_readonly("launches", &Counters::launches)
      .def_readonly("synchronizations", &Counters::synchronizations)
      .def_readonly("unknown_shapes", &Counters::unknown_shapes)
      .def_readonly("collectives", &Counters::collectives)
      .def_readonly("allocations", &Counters::allocations)
      .def_readonly("allocated_bytes", &Counters::allocated_bytes)
      .def_readonly("copied_bytes", &Counters::copied_bytes)
      .def("__sub__", [](const Counters& later, const Counters& earlier) { return later - earlier; });
  module.def("counters", &counters, py::arg("device"));
}

void bind_random(py::module_& module) {
  module.def("rng_state", [](c10::DeviceIndex device) {
    return at::Tensor(default_generator(device).get<Generator>()->get_state());
  });
  module.def("set_rng_state", [](const at::Tensor& state, c10::DeviceIndex device) {
    default_generator(device).get<Generator>()->set_state(*state.unsafeGetTensorImpl());
  });
  module.def("manual_seed", [](uint64_t seed, c10::DeviceIndex device) {
    default_generator(device).get<Generator>()->set_current_seed(seed);
  });
  module.def("initial_seed",
             [](c10::DeviceIndex device) { return default_generator(device).get<Generator>()->current_seed(); });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch._C._distributed_c10d");  // torch's types of stores and backends
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  bind_errors(module);
  bind_counters(module);
  bind_random(module);
  module.attr("device_count") = static_cast<int>(device_count);
  module.def("install", &install);
  module.def(
      "restart",
      [](uint64_t seed, double longest_delay) {
        restart({seed, std::chrono::microseconds(static_cast<int64_t>(longest_delay * 1e6))});
      },
      py::arg("seed"), py::arg("longest_delay"), without_gil);
  module.def("current_device", &current_device);
  module.def("used_bytes", [](c10::DeviceIndex device) { return Device::at(device).memory().used_bytes(); });
  module.def(
      "make_process_group",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size,
         double timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<ProcessGroup>(room_of_processes(store, name, rank, size), rank, current_device(),
                                                 ProcessGroup::Options{.deadline = milliseconds(timeout)});
      },
      py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("timeout"), without_gil);
}

}  // namespace tesserae::sim
