#include "tesserae/dial/dial.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/dial/facts.h"

namespace tesserae::bindings {
namespace {

using Triple = std::tuple<int, int, int>;

mesh::Degrees degrees_of(const Triple& triple) {
  return {std::get<0>(triple), std::get<1>(triple), std::get<2>(triple)};
}

// Rank 0's answer, which Python gives. What holds the function may end on a thread without the GIL.
std::function<std::string(int)> answer_of(std::optional<py::function> cannot_scale) {
  if (!cannot_scale) return {};
  const auto held =
      std::shared_ptr<py::function>(new py::function(*std::move(cannot_scale)), [](py::function* function) {
        if (Py_IsInitialized() == 0) return;  // the interpreter has taken it along
        const py::gil_scoped_acquire gil;
        delete function;
      });
  return [held](int ranks) {
    const py::gil_scoped_acquire gil;
    return (*held)(ranks).cast<std::string>();
  };
}

}  // namespace

void bind_dial(py::module_& module) {
  using dial::Dial;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<dial::Server, std::shared_ptr<dial::Server>>(module, "DialServer", "What answers at dial.sock; rank 0's.")
      .def(
          "tell",
          [](dial::Server& self, int64_t client, const std::string& event) {
            self.tell(client, dial::Json::parse(event));
          },
          py::arg("client"), py::arg("event"), without_gil, "An event (tesserae/dial/protocol.h), as JSON text.");
  // One for each model; collective over the job.
  py::class_<Dial>(module, "Dial", "When a job changes its degrees; see tesserae/dial/dial.h.")
      .def(py::init([](Unit& unit, const std::vector<std::pair<int64_t, Triple>>& schedule, bool automatic,
                       double headroom, int64_t planned_steps, const std::string& folder, double state_per_master,
                       std::optional<py::function> cannot_scale, std::shared_ptr<dial::Server> server) {
             auto& engine = unit.engine();
             dial::DialOptions options;
             for (const auto& [step, degrees] : schedule) options.schedule.push_back({step, degrees_of(degrees)});
             options.automatic = automatic;
             options.tuner.headroom = headroom;
             options.tuner.planned_steps = planned_steps;
             options.folder = folder;
             options.cannot_scale = answer_of(std::move(cannot_scale));
             options.server = std::move(server);
             const py::gil_scoped_release released;
             options.facts = dial::facts_of(engine, state_per_master);
             // The whole job turns its dial together, all tensor indices alike; a group of the script's own does alone.
             const shard::Sharding& sharding = engine.root().sharding();
             comm::MeshFabric& job = *sharding.mesh;
             const bool whole_job = job.over(mesh::axes::state) == sharding.fabric;
             return std::make_unique<Dial>(whole_job ? job.job() : sharding.fabric, engine.setting(),
                                           std::move(options));
           }),
           py::kw_only(), py::arg("unit"), py::arg("schedule"), py::arg("automatic"), py::arg("headroom"),
           py::arg("planned_steps"), py::arg("folder"), py::arg("state_per_master"),
           py::arg("cannot_scale") = py::none(), py::arg("server") = nullptr)
      .def(
          "at_step_edge",
          [](Dial& self, int64_t step, double seconds) -> std::optional<Triple> {
            const auto to = self.at_step_edge(step, seconds);
            if (!to) return std::nullopt;
            if (to->tiers != self.setting().tiers) {
              self.refused("the state of a script's model does not change its tier; `tesserae train` moves its own");
              return std::nullopt;
            }
            return Triple{to->degrees.parameters, to->degrees.gradients, to->degrees.optimizer};
          },
          py::arg("step"), py::arg("seconds"), without_gil,
          "Collective: the degrees to change to after this step, the same on all ranks; None: as they are.")
      .def_property_readonly(
          "scaling",
          [](const Dial& self) -> std::optional<std::pair<int, int64_t>> {
            if (!self.scaling()) return std::nullopt;
            return std::pair(self.scaling()->ranks, self.scaling()->client);
          },
          "Another number of ranks that the last edge said was asked for, and by whom; the same number on all ranks.")
      .def("hand_over", &Dial::hand_over, without_gil, "Rank 0's server, for the next dial; None elsewhere.")
      .def("changed", &Dial::changed, py::arg("change"), without_gil)
      .def("refused", &Dial::refused, py::arg("why"), without_gil);
}

}  // namespace tesserae::bindings
