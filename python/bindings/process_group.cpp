#include "tesserae/comm/torch_backend/process_group.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "python/bindings/bindings.h"
#include "tesserae/comm/transports/gloo_group.h"
#include "tesserae/os/seconds.h"

namespace tesserae::bindings {

void bind_process_group(py::module_& module) {
  using comm::ProcessGroup;
  py::module_::import("torch._C._distributed_c10d");  // torch's type of what connect returns
  module.def(
      "connect_process_group",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& name,
         const std::vector<int64_t>& global_ranks, double timeout, bool served) {
        const std::chrono::milliseconds limit = os::milliseconds(timeout);
        return ProcessGroup::connect(store, rank, size, {name, global_ranks, limit, served});
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("name"), py::arg("global_ranks"),
      py::arg("timeout"), py::arg("served"), py::call_guard<py::gil_scoped_release>(),
      "Collective: a process group of torch over shared memory. `global_ranks`: empty for the default group.");
  module.def(
      "abort_process_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        for (const auto& device : group->getDeviceTypes()) {
          const auto backend = group->getBackend(device.type());
          backend->abort();
          comm::close_gloo_connections(*backend);
        }
      },
      py::arg("group"), py::call_guard<py::gil_scoped_release>(),
      "A process group of torch that has failed, in a process that goes on: what blocks in it fails, also elsewhere.");
  module.def("missing_in_process_groups", &ProcessGroup::all_missing_ranks,
             "Torch's ranks for which others waited when operations of our process groups failed at their deadline.");
  module.def("shutdown_process_groups", &ProcessGroup::shutdown_all, py::call_guard<py::gil_scoped_release>(),
             "Ends all of them, before the process ends.");
}

}  // namespace tesserae::bindings
