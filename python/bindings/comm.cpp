#include <pybind11/stl.h>

#include "python/bindings/bindings.h"
#include "python/bindings/error_class.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/liveness/process_waits.h"

namespace tesserae::bindings {

void bind_comm(py::module_& module) {
  using namespace tesserae::comm;
  const py::object error = bind_error<CommError>(
      module, "CommError", module.attr("Error"),
      "A collective operation failed. The group is unusable afterwards: the job ends or restarts from a checkpoint.");
  py::object lost = bind_error<PeerLost>(
      module, "PeerLost", error, "A rank of the job is gone. `ranks`: job ranks, those lost first in front.",
      [](py::object& raised, const PeerLost& lost) { raised.attr("ranks") = py::tuple(py::cast(lost.ranks)); });
  lost.attr("ranks") = py::tuple();
  py::object timeout = bind_error<Timeout>(
      module, "Timeout", error,
      "A deadline passed. `silent`: job ranks without a sign of life; `absent`: those that are alive, and in no "
      "operation while others wait: they did not call it. Both are empty where it cannot be told.",
      [](py::object& raised, const Timeout& timeout) {
        raised.attr("silent") = py::tuple(py::cast(timeout.silent));
        raised.attr("absent") = py::tuple(py::cast(timeout.absent));
      });
  timeout.attr("silent") = py::tuple();
  timeout.attr("absent") = py::tuple();
  module.def("waits_unseen", &waits_unseen,
             "This process may wait in groups that are not ours: no other rank takes it for absent any more.");
  bind_error<Mismatch>(module, "Mismatch", error, "Ranks disagree on what they do. The text gives both sides.");
}

}  // namespace tesserae::bindings
