#include "tesserae/monitor/monitor.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/dial/protocol.h"
#include "tesserae/os/seconds.h"
#include "tesserae/os/signals.h"
#include "tesserae/watch/server.h"

namespace tesserae::bindings {
namespace {

using monitor::Monitor;

monitor::Stage stage_named(const std::string& name) {
  const auto found = std::ranges::find(monitor::stage_names, name);
  if (found == monitor::stage_names.end()) throw InvalidArgument("Monitor.enter", cat("there is no stage ", name));
  return static_cast<monitor::Stage>(found - monitor::stage_names.begin());
}

/// The frames of all Python threads, as faulthandler writes them to `file` at `signal`. With the GIL, so that nobody
/// runs meanwhile; a thread that hangs may hold it for ever: after a second it is done without, and who reads frames
/// that change may crash the process. It hangs anyway.
std::string python_stacks(int signal, int file) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool given_up = false, done = false;
    std::string text;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread([shared, signal, file] {
    const PyGILState_STATE state = PyGILState_Ensure();
    {
      const std::scoped_lock lock(shared->mutex);
      if (!shared->given_up) shared->text = os::written_at_signal(signal, file);
      shared->done = true;
    }
    PyGILState_Release(state);
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  if (!shared->changed.wait_for(lock, std::chrono::seconds(1), [&] { return shared->done; })) {
    shared->given_up = true;
    return os::written_at_signal(signal, file);
  }
  return shared->text;
}

/// Calls a Python function from where the GIL is not held.
std::function<double()> with_gil(const py::function& call) {
  const std::shared_ptr<py::function> held(new py::function(call), [](py::function* function) {
    const py::gil_scoped_acquire gil;
    delete function;
  });
  return [held] {
    const py::gil_scoped_acquire gil;
    try {
      return (*held)().cast<double>();
    } catch (const py::error_already_set& error) {  // no reason for a step to fail
      log(LogLevel::debug, cat("the optimizer's memory is not known: ", error.what()));
      return 0.0;
    }
  };
}

}  // namespace

void bind_monitor(py::module_& module) {
  py::class_<watch::Server>(module, "Page", "Serves the page of a run until it is gone; see tesserae/watch/server.h.")
      .def(py::init([](const std::string& folder, const std::string& host, uint16_t port, bool allow_control) {
             return std::make_unique<watch::Server>(
                 folder, watch::ServerOptions{
                             .host = host, .port = port, .token = {}, .allow_control = allow_control, .begins = true});
           }),
           py::kw_only(), py::arg("folder"), py::arg("host"), py::arg("port"), py::arg("allow_control"))
      .def_property_readonly("url", &watch::Server::url);
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Monitor>(module, "Monitor", "What a rank does and how long it takes; see tesserae/monitor/monitor.h.")
      .def(py::init([](Unit& unit, const std::string& folder, double every_seconds, const std::string& job,
                       const py::function& optimizer_bytes, std::pair<int, int> stacks) {
             comm::MeshFabric& mesh = *unit.engine().root().sharding().mesh;
             monitor::MonitorOptions options{.folder = folder,
                                             .job = monitor::Json::parse(job),
                                             .every = os::milliseconds(every_seconds),
                                             .optimizer_bytes = with_gil(optimizer_bytes),
                                             .more_stacks = {}};
             const auto [signal, file] = stacks;
             if (file >= 0) options.more_stacks = [signal, file] { return python_stacks(signal, file); };
             const py::gil_scoped_release no_gil;
             return std::make_unique<Monitor>(mesh.job(), std::move(options));
           }),
           py::kw_only(), py::arg("unit"), py::arg("folder"), py::arg("every_seconds"), py::arg("job"),
           py::arg("optimizer_bytes"), py::arg("stacks"),
           "`unit`: of the model whose job is watched; `folder`: of the run, \"\": nothing is written; `job`: JSON; "
           "`stacks`: a signal\n"
           "at which faulthandler writes to a file, and its descriptor, or -1.")
      .def(
          "watch", [](Monitor& self, Unit& unit) { self.watch(unit.engine()); }, py::arg("unit"), without_gil,
          "Times all units of that one's engine. Between steps.")
      .def(
          "enter", [](Monitor& self, const std::string& stage) { self.timer().enter(stage_named(stage)); },
          py::arg("stage"), without_gil)
      .def(
          "next_forward_has", [](Monitor& self, int64_t tokens) { self.timer().next_forward_has(tokens); },
          py::arg("tokens"), without_gil, "What the forward that is about to begin takes in.")
      .def(
          "set_degrees",
          [](Monitor& self, const std::tuple<int, int, int>& degrees) {
            self.set_job("degrees", {std::get<0>(degrees), std::get<1>(degrees), std::get<2>(degrees)});
          },
          py::arg("degrees"), without_gil)
      .def(
          "tell",
          [](Monitor& self, int64_t step, const std::string& kind, const std::string& text) {
            self.tell({.step = step, .kind = kind, .rank = -1, .text = text});
          },
          py::arg("step"), py::arg("kind"), py::arg("text"), without_gil)
      .def(
          "status", [](const Monitor& self) { return self.status().dump(); }, without_gil,
          "What now.json holds, as JSON text: on rank 0 of the whole job, elsewhere of this rank.")
      .def("end", &Monitor::end, py::arg("how"), without_gil);
}

}  // namespace tesserae::bindings
