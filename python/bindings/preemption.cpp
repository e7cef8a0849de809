#include <pybind11/stl.h>

#include "python/bindings/bindings.h"
#include "tesserae/base/error.h"
#include "tesserae/mesh/world.h"
#include "tesserae/os/seconds.h"
#include "tesserae/preemption/agree.h"

namespace tesserae::bindings {
namespace {

using preemption::Notice;
using preemption::Watch;

/// A script may make one before its ranks meet: the launcher says which rank of its host this is.
bool asks_here() {
  try {
    return mesh::World::from_environment().launch().local_rank == 0;
  } catch (const InvalidArgument&) {
    return true;  // a launcher that we do not know: at worst every rank asks
  }
}

std::optional<std::string> reason_of(const std::optional<Notice>& notice) {
  return notice ? std::optional(notice->reason) : std::nullopt;
}

}  // namespace

void bind_preemption(py::module_& module) {
  py::class_<Watch>(module, "Watch", "Whether this process was asked to end; see tesserae/preemption/watch.h.")
      .def(py::init([](const std::optional<std::string>& file, const std::optional<std::string>& command,
                       double every_seconds) {
             // Ctrl-C stays Python's.
             preemption::Sources sources{.signals = {os::signal_terminate, os::signal_user}};
             sources.every = os::milliseconds(every_seconds);
             if (asks_here()) {
               sources.file = file.value_or("");
               sources.command = command.value_or("");
             }
             return std::make_unique<Watch>(sources);
           }),
           py::kw_only(), py::arg("file"), py::arg("command"), py::arg("every_seconds"))
      .def(
          "notice", [](const Watch& self) { return reason_of(self.notice()); },
          "What asked this process to end; None: nothing did.")
      .def(
          "agree",
          [](const Watch& self, comm::Fabric& fabric) { return reason_of(preemption::agree(self.notice(), fabric)); },
          py::arg("fabric"), py::call_guard<py::gil_scoped_release>(),
          "Collective: what asked a rank of the fabric to end, the same on all of them.");
}

}  // namespace tesserae::bindings
