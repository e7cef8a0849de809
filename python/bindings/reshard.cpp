#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/unit.h"
#include "tesserae/shard/replica_check.h"

namespace tesserae::bindings {
namespace {

/// A companion whose tensors are kept in Python: an object with the methods of shard::Companion, which get the number
/// of a shard. The engine calls it without the GIL.
class PythonCompanion final : public shard::Companion {
 public:
  explicit PythonCompanion(const py::object& kept) : kept_(kept) {}

  std::vector<c10::ScalarType> dtypes(const shard::Shard& shard) override {
    const py::gil_scoped_acquire acquire;
    return kept_.attr("dtypes")(shard.index).cast<std::vector<at::ScalarType>>();
  }
  std::vector<at::Tensor> take(const shard::Shard& shard) override {
    const py::gil_scoped_acquire acquire;
    return kept_.attr("take")(shard.index).cast<std::vector<at::Tensor>>();
  }
  void put(const shard::Shard& shard, std::vector<at::Tensor> tensors) override {
    const py::gil_scoped_acquire acquire;
    kept_.attr("put")(shard.index, std::move(tensors));
  }

 private:
  const py::object& kept_;
};

using Triple = std::tuple<int, int, int>;

Triple triple(const mesh::Degrees& degrees) {
  return {degrees.parameters, degrees.gradients, degrees.optimizer};
}

}  // namespace

void bind_reshard(py::module_& module) {
  py::class_<shard::Resharding>(module, "Resharding", "What a change of degrees did on this rank.")
      .def_property_readonly(
          "before", [](const shard::Resharding& self) { return triple(self.from.degrees); },
          "The degrees (parameters, gradients, optimizer) before it.")
      .def_property_readonly(
          "after", [](const shard::Resharding& self) { return triple(self.to.degrees); }, "The degrees since.")
      .def_readonly("seconds", &shard::Resharding::seconds, "Until the model could train again.")
      .def_readonly("bytes", &shard::Resharding::bytes, "That this rank sent to others.");

  module.def(
      "reshard",
      [](Unit& unit, const Triple& degrees, const py::object& state) {
        auto& engine = unit.engine();
        PythonCompanion companion(state);
        const auto added = engine.add_companion(companion);
        const py::gil_scoped_release release;
        return engine.reshard({std::get<0>(degrees), std::get<1>(degrees), std::get<2>(degrees)});
      },
      py::arg("unit"), py::arg("degrees"), py::arg("state"),
      "Collective: the engine of that unit goes over to (parameters, gradients, optimizer) between steps. `state` "
      "keeps "
      "tensors beside its shards: dtypes(shard), take(shard) and put(shard, tensors), as in "
      "tesserae/shard/companion.h.");

  py::class_<shard::ReplicaReport>(module, "ReplicaReport",
                                   "What a comparison of replicas found; the same on all ranks, but for `here`.")
      .def_readonly("suspects", &shard::ReplicaReport::suspects,
                    "Ranks whose bytes are not those of most; of all, where none are.")
      .def_readonly("here", &shard::ReplicaReport::here, "Whether this rank is one of them.")
      .def_readonly("decided", &shard::ReplicaReport::decided,
                    "Whether some bytes had a majority wherever they differ.")
      .def_readonly("text", &shard::ReplicaReport::text, "Which parameters, by rank.");
  module.def(
      "compare_replicas",
      [](Unit& unit, const py::object& state) {
        auto& engine = unit.engine();
        PythonCompanion companion(state);
        const auto added = engine.add_companion(companion);
        const py::gil_scoped_release release;
        return shard::compare_replicas(engine);
      },
      py::arg("unit"), py::arg("state"),
      "Collective: compares what ranks of the unit's engine hold alike; see tesserae/shard/replica_check.h. "
      "`state`: as for reshard().");
}

}  // namespace tesserae::bindings
