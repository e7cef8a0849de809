#include "tesserae/checkpoint/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "python/bindings/error_class.h"
#include "python/bindings/unit.h"
#include "tesserae/comm/agree.h"

namespace tesserae::bindings {
namespace {

using checkpoint::Checkpoint;
using checkpoint::Piece;

Piece make_piece(std::string name, std::vector<int64_t> shape, int64_t begin, int64_t end, const at::Tensor& data,
                 const std::optional<mesh::Splits>& split, bool written, bool changes_in_forward, bool optional) {
  if (!data.is_contiguous() || data.numel() != end - begin) {
    throw InvalidArgument("Piece", cat(name, ": elements ", begin, " to ", end, " are in a tensor of ", data.numel(),
                                       data.is_contiguous() ? "" : ", which is not contiguous"));
  }
  try {
    checkpoint::dtype_of(data.scalar_type());
  } catch (const InvalidArgument&) {
    throw InvalidArgument("checkpoint", cat(name, " is of ", c10::toString(data.scalar_type()),
                                            ", for which safetensors files have no type; leave it out"));
  }
  // detach(): another C++ object, so that a thread of the saver never ends the life of a Python object.
  return {.name = std::move(name),
          .shape = std::move(shape),
          .split = split.value_or(mesh::Splits{}),
          .elements = {begin, end},
          .data = data.detach(),
          .written = written,
          .changes_in_forward = changes_in_forward,
          .optional = optional};
}

at::Tensor read_tensor(const Checkpoint& opened, const std::string& name) {
  const auto* stored = opened.manifest().find(name);
  if (stored == nullptr) throw InvalidArgument("Checkpoint", cat(opened.path().native(), " has no tensor ", name));
  const at::Tensor tensor = at::empty(stored->shape, checkpoint::scalar_type_of(stored->dtype));
  // In row-major order, also where it is stored split.
  checkpoint::load(
      opened, {{.name = name, .shape = stored->shape, .elements = {0, stored->elements()}, .data = tensor.view({-1})}});
  return tensor;
}

/// What Python raised while ranks load together: the others hear its text, and this rank raises it again.
struct Raised {
  std::optional<py::error_already_set> error;

  template <class Function>
  void guard(const Function& call) {
    const py::gil_scoped_acquire acquire;
    try {
      call();
    } catch (py::error_already_set& raised) {
      const std::string text = py::str(raised.value());
      error.emplace(std::move(raised));
      throw std::runtime_error(text);
    }
  }
};

std::optional<Checkpoint> load_together(comm::Fabric& fabric, const std::string& path, const py::function& collect,
                                        const py::function& check) {
  Raised raised;
  const checkpoint::LoadInto into = [&](const Checkpoint& opened) {
    std::vector<Piece> pieces;
    raised.guard([&] { pieces = collect(opened).cast<std::vector<Piece>>(); });
    checkpoint::load(opened, pieces);
    raised.guard([&] { check(); });
  };
  try {
    const py::gil_scoped_release release;
    bool chosen = false;
    try {
      chosen = fabric.rank() == 0 && checkpoint::means_one(path);
    } catch (const IoError&) {  // load_newest() meets it, too, and tells all ranks
    }
    if (!comm::text_of(fabric, chosen ? "this one" : "", 0).empty()) return load_chosen(fabric, path, into);
    return load_newest(fabric, path, into);
  } catch (const std::exception&) {
    if (raised.error) throw std::move(*raised.error);
    throw;
  }
}

void bind_errors(py::module_& module) {
  auto damaged = bind_error<checkpoint::Damaged>(
      module, "Damaged", module.attr("Corruption"),
      "A checkpoint is not what was written. `file`; `tensor` (\"\": none, or unknown); `offset`: byte of the file, or "
      "None.",
      [](py::object& raised, const checkpoint::Damaged& damaged) {
        raised.attr("file") = damaged.fault().file;
        raised.attr("tensor") = damaged.fault().tensor;
        raised.attr("offset") = damaged.fault().offset;
      });
  damaged.attr("file") = "";
  damaged.attr("tensor") = "";
  damaged.attr("offset") = py::none();
  auto failed = bind_error<checkpoint::SaveFailed>(
      module, "SaveFailed", module.attr("IoError"),
      "`step` was not saved, on whatever rank it failed. Older checkpoints are as they were; training may go on.",
      [](py::object& raised, const checkpoint::SaveFailed& failed) { raised.attr("step") = failed.step; });
  failed.attr("step") = 0;
}

void bind_units(py::module_& module) {
  module.def(
      "flat_slices",
      [](const Unit& unit, size_t index) {
        const shard::FlatBuffer& buffer = *unit.sharded().buffers().at(index);
        const shard::Flat& flat = buffer.flat();
        const int rank = unit.sharded().sharding().fabric->rank();
        std::vector<std::tuple<int, int64_t, int64_t, int64_t>> slices;
        size_t slot = 0;
        for (const auto& slice : flat.slices(buffer.parameter().local_range())) {
          while (flat.slots()[slot].names.front() != slice.name) ++slot;
          slices.emplace_back(slot, slice.begin, slice.end, slice.offset);
        }
        return std::make_pair(checkpoint::writes_part(flat, rank), slices);
      },
      py::arg("unit"), py::arg("index"),
      "Whether this rank writes its part of a flat buffer, and (slot, begin, end, offset) for each slot in the part: "
      "elements [begin, end) of the part are those of the slot from `offset` on.");
  module.def(
      "unit_fabric", [](const Unit& unit) { return unit.sharded().sharding().fabric; }, py::arg("unit"));
  module.def(
      "unit_degrees",
      [](const Unit& unit) {
        const auto& degrees = unit.sharded().sharding().layout.degrees();
        return std::make_tuple(degrees.parameters, degrees.gradients, degrees.optimizer);
      },
      py::arg("unit"), "(parameters, gradients, optimizer).");
  module.def(
      "publish_unit",
      [](const Unit& unit) {
        unit.engine().require_not_torn();
        unit.sharded().publish();
      },
      py::arg("unit"), py::call_guard<py::gil_scoped_release>(),
      "Collective: new values of the unit's parts are what the next forward sees.");
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  bind_errors(module);

  py::class_<Piece>(module, "Piece", "This rank's part of one tensor; see tesserae/checkpoint/state.h.")
      .def(py::init(&make_piece), py::arg("name"), py::arg("shape"), py::arg("begin"), py::arg("end"), py::arg("data"),
           py::kw_only(), py::arg("split") = std::nullopt, py::arg("written") = true,
           py::arg("changes_in_forward") = false, py::arg("optional") = false,
           "Elements [begin, end) of the flattened tensor, or of its part that `split` means, are in `data`, "
           "contiguous: the memory to save or to fill.");

  py::class_<Checkpoint>(module, "Checkpoint", "A committed checkpoint, open for reading.")
      .def_static(
          "open", [](const std::string& path) { return Checkpoint::open(path); }, py::arg("path"), without_gil)
      .def_property_readonly("path", [](const Checkpoint& self) { return self.path().native(); })
      .def_property_readonly("step", &Checkpoint::step)
      .def_property_readonly(
          "training", [](const Checkpoint& self) { return self.manifest().training.dump(); }, "JSON text.")
      .def(
          "tensors",
          [](const Checkpoint& self) {
            std::map<std::string, std::pair<std::vector<int64_t>, at::ScalarType>> tensors;
            for (const auto& tensor : self.manifest().tensors) {
              tensors.emplace(tensor.name, std::make_pair(tensor.shape, checkpoint::scalar_type_of(tensor.dtype)));
            }
            return tensors;
          },
          "Name -> (shape, dtype).")
      .def("read", &read_tensor, py::arg("name"), without_gil, "One tensor, whole, on the host, checked.");

  module.def(
      "list_checkpoints",
      [](const std::string& folder) {
        std::vector<std::pair<int64_t, std::string>> found;
        for (const auto& committed : checkpoint::list_checkpoints(folder)) {
          found.emplace_back(committed.step, committed.path.native());
        }
        return found;
      },
      py::arg("folder"), without_gil, "(step, path) of the committed checkpoints of a folder, oldest step first.");
  module.def("load_checkpoint", &load_together, py::arg("fabric"), py::arg("path"), py::arg("collect"),
             py::arg("check"),
             "Collective: loads a checkpoint, or the newest of a folder that can be loaded on all ranks; None if the "
             "folder has none. collect(checkpoint) -> the pieces to fill, check() when they are filled.");
  module.def(
      "agree",
      [](comm::Fabric& fabric, const std::string& failure) -> std::optional<std::pair<int, std::string>> {
        const int rank = comm::lowest_rank_with(fabric, !failure.empty());
        if (rank < 0) return std::nullopt;
        return std::make_pair(rank, comm::text_of(fabric, failure, rank));
      },
      py::arg("fabric"), py::arg("failure"), without_gil,
      "Collective: the lowest rank with a failure (a text that is not empty) and its text; None if there is none.");
  bind_units(module);
  bind_saver(module);
}

}  // namespace tesserae::bindings
