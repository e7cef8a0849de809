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

}  // namespace

void bind_dial(py::module_& module) {
  using dial::Dial;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  // One for each model; collective over the job.
  py::class_<Dial>(module, "Dial", "When a job changes its degrees; see tesserae/dial/dial.h.")
      .def(py::init([](Unit& unit, const std::vector<std::pair<int64_t, Triple>>& schedule, bool automatic,
                       double headroom, int64_t planned_steps, const std::string& folder, double state_per_master) {
             auto& engine = unit.engine();
             dial::DialOptions options;
             for (const auto& [step, degrees] : schedule) options.schedule.push_back({step, degrees_of(degrees)});
             options.automatic = automatic;
             options.tuner.headroom = headroom;
             options.tuner.planned_steps = planned_steps;
             options.folder = folder;
             options.facts = dial::facts_of(engine, state_per_master);
             // The whole job turns its dial together, all tensor indices alike; a group of the script's own does alone.
             const shard::Sharding& sharding = engine.root().sharding();
             comm::MeshFabric& job = *sharding.mesh;
             const bool whole_job = job.over(mesh::axes::state) == sharding.fabric;
             return std::make_unique<Dial>(whole_job ? job.job() : sharding.fabric, engine.setting(),
                                           std::move(options));
           }),
           py::kw_only(), py::arg("unit"), py::arg("schedule"), py::arg("automatic"), py::arg("headroom"),
           py::arg("planned_steps"), py::arg("folder"), py::arg("state_per_master"), without_gil)
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
      .def("changed", &Dial::changed, py::arg("change"), without_gil)
      .def("refused", &Dial::refused, py::arg("why"), without_gil);
}

}  // namespace tesserae::bindings
