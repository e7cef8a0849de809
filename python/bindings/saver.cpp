#include "tesserae/checkpoint/saver.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "python/bindings/bindings.h"
#include "tesserae/checkpoint/held_state.h"
#include "tesserae/checkpoint/writer.h"
#include "tesserae/comm/agree.h"
#include "tesserae/os/random_name.h"

namespace tesserae::bindings {
namespace {

using checkpoint::Piece;
using Degrees = std::tuple<int, int, int>;  // parameters, gradients, optimizer

checkpoint::State make_state(const comm::Fabric& fabric, int64_t step, const Degrees& degrees, int tensor, int expert,
                             std::vector<Piece> pieces, const std::string& training) {
  const auto& [parameters, gradients, optimizer] = degrees;
  return {.step = step,
          .layout = {fabric.size() / tensor, {parameters, gradients, optimizer}},
          .axes = {.tensor = tensor, .expert = expert},
          .pieces = std::move(pieces),
          .training = nlohmann::json::parse(training)};
}

/// A saver with the fabric that its ranks talk over.
struct Saver {
  explicit Saver(const std::shared_ptr<comm::Fabric>& joined) : fabric(joined), saver(joined, {}) {}

  std::shared_ptr<comm::Fabric> fabric;
  checkpoint::Saver saver;

  void save(const std::string& folder, int keep, bool read_back, checkpoint::State state, bool asynchronous) {
    saver.set_target(folder, keep, read_back);
    saver.save(std::move(state), asynchronous);
  }

  bool finish_if_done() {
    const auto sums = comm::counts_over_ranks(*fabric, {saver.busy() ? 1 : 0, saver.failed() ? 1 : 0});
    if (sums[0] > 0 && sums[1] == 0) return false;
    saver.finish();
    return true;
  }
};

/// A tensor that Python hands over when its turn to be written comes.
class Streamed {
 public:
  Streamed(std::string name, at::ScalarType dtype, uint64_t bytes, py::function fetch)
      : name_(std::move(name)), dtype_(dtype), bytes_(bytes), fetch_(std::move(fetch)) {}
  ~Streamed() {
    const py::gil_scoped_acquire acquire;
    tensor_.reset();
    fetch_ = py::function();
  }
  Streamed(const Streamed&) = delete;
  Streamed& operator=(const Streamed&) = delete;

  void fill(uint64_t offset, std::span<char> target) {
    const bool last = offset + target.size() == bytes_;
    const py::gil_scoped_acquire acquire;
    if (!tensor_.defined()) {
      tensor_ = fetch_().cast<at::Tensor>().detach().cpu().contiguous();
      if (tensor_.scalar_type() != dtype_ || tensor_.nbytes() != bytes_) {
        throw InvalidArgument("write_checkpoint",
                              cat(name_, " has ", tensor_.nbytes(), " bytes of ", c10::toString(tensor_.scalar_type()),
                                  ", announced were ", bytes_, " of ", c10::toString(dtype_)));
      }
    }
    std::memcpy(target.data(), static_cast<const char*>(tensor_.const_data_ptr()) + offset, target.size());
    if (last) tensor_.reset();
  }

 private:
  std::string name_;
  at::ScalarType dtype_;
  uint64_t bytes_;
  py::function fetch_;
  at::Tensor tensor_;
};

using Announced = std::tuple<std::string, at::ScalarType, std::vector<int64_t>, py::function>;

std::string write_checkpoint(const std::string& folder, int64_t step, const std::string& training,
                             const std::vector<Announced>& tensors) {
  std::vector<checkpoint::Source> sources;
  for (const auto& [name, dtype, shape, fetch] : tensors) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    checkpoint::Source source{name, checkpoint::dtype_of(dtype), shape, {0, elements}};
    auto streamed = std::make_shared<Streamed>(name, dtype, source.bytes(), fetch);
    source.fill = [streamed](uint64_t offset, std::span<char> target) { streamed->fill(offset, target); };
    sources.push_back(std::move(source));
  }
  const checkpoint::SaveJob job{.folder = folder, .step = step, .attempt = os::random_name()};
  const auto parsed = nlohmann::json::parse(training);
  const py::gil_scoped_release release;
  checkpoint::write_part(job, sources);
  return checkpoint::commit(job, parsed).native();
}

}  // namespace

void bind_saver(py::module_& module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<checkpoint::State>(module, "State", "What a save takes; see tesserae/checkpoint/state.h.")
      .def(py::init(&make_state), py::arg("fabric"), py::kw_only(), py::arg("step"), py::arg("degrees"),
           py::arg("tensor"), py::arg("expert"), py::arg("pieces"), py::arg("training"),
           "`training`: JSON text; rank 0's is kept.");
  py::class_<checkpoint::HeldState>(module, "HeldState", "See tesserae/checkpoint/held_state.h.")
      .def(py::init<comm::Fabric&, checkpoint::State, std::vector<Piece>>(), py::arg("fabric"), py::arg("state"),
           py::arg("own"), without_gil, "Collective.")
      .def_property_readonly("state", &checkpoint::HeldState::state);
  module.def(
      "save_held",
      [](const std::shared_ptr<comm::Fabric>& fabric, const std::optional<checkpoint::HeldState>& held,
         const std::string& folder,
         int keep) { return checkpoint::save_held(fabric, held ? &*held : nullptr, folder, keep); },
      py::arg("fabric"), py::arg("held"), py::arg("folder"), py::arg("keep"), without_gil,
      "Collective: saves what the ranks hold together, if that is a whole state and newer than what the folder has. "
      "Returns its step, or None.");

  // Destroyed without the GIL: the thread that is joined then may need it.
  py::class_<Saver, std::shared_ptr<Saver>>(module, "Saver", "See tesserae/checkpoint/saver.h.")
      .def(py::init([](const std::shared_ptr<comm::Fabric>& fabric) {
             return std::shared_ptr<Saver>(new Saver(fabric), [](Saver* saver) {
               const py::gil_scoped_release release;
               delete saver;
             });
           }),
           py::arg("fabric"), without_gil, "Collective.")
      .def("save", &Saver::save, py::arg("folder"), py::arg("keep"), py::arg("read_back"), py::arg("state"),
           py::arg("asynchronous"), without_gil,
           "Collective: finishes the last save, then saves the state, or begins to.")
      .def(
          "wait_copied", [](Saver& self) { self.saver.wait_copied(); }, without_gil)
      .def(
          "finish", [](Saver& self) { self.saver.finish(); }, without_gil, "Collective.")
      .def(
          "leave", [](Saver& self) { self.saver.leave(); }, without_gil,
          "Of a save whose other ranks may be lost: this rank's part is written to its end.")
      .def("finish_if_done", &Saver::finish_if_done, without_gil,
           "Collective: False if a rank is not done yet and none has failed; else finish().");

  module.def("write_checkpoint", &write_checkpoint, py::arg("folder"), py::arg("step"), py::arg("training"),
             py::arg("tensors"),
             "Writes a checkpoint from one process: (name, dtype, shape, fetch) for each tensor, where fetch() returns "
             "the tensor when its turn comes and it is not kept. Returns the checkpoint's directory.");
}

}  // namespace tesserae::bindings
