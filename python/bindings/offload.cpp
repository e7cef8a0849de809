#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "tesserae/offload/activations.h"
#include "tesserae/offload/host_blocks.h"
#include "tesserae/offload/memory_limit.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/os/memory.h"

namespace tesserae::bindings {
namespace {

at::Tensor alias_of(const at::Tensor& tensor) {
  at::Tensor alias = at::empty({0}, at::TensorOptions(tensor.device()).dtype(tensor.dtype()));
  alias.set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return alias;
}

// A rank's part of its host's memory, and the disk whose state stays within what the rest of the process leaves of it.
struct Limited {
  std::shared_ptr<offload::Disk> disk;
  offload::MemoryLimit limit;
};

void bind_paged_tensors(py::module_& module) {
  using offload::Access;
  using offload::Disk;
  using offload::DiskCounters;
  using offload::Use;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<DiskCounters>(module, "DiskCounters", "Bytes; see tesserae/offload/disk.h.")
      .def_readonly("bytes_read", &DiskCounters::read, "From the disk.")
      .def_readonly("bytes_written", &DiskCounters::written, "To it.")
      .def_readonly("seconds_waited", &DiskCounters::waited,
                    "In which somebody needed what was not there yet, or room.")
      .def_readonly("bytes_on_disk", &DiskCounters::size, "Taken on the disk.")
      .def_readonly("bytes_in_memory", &DiskCounters::resident, "Of that, now.")
      .def_readonly("most_bytes_in_memory", &DiskCounters::most_resident, "At any time.");

  py::class_<Limited>(module, "Disk", "The scratch file of this rank, and how much of it may be in memory.")
      .def(py::init([](const std::string& folder, std::optional<int64_t> limit, int ranks) {
             auto disk = std::make_shared<Disk>(
                 offload::DiskOptions{.folder = folder, .memory = offload::MemoryLimit::at_first});
             return Limited{disk, offload::MemoryLimit(disk, offload::memory_of_rank(limit, ranks))};
           }),
           py::kw_only(), py::arg("folder"), py::arg("limit"), py::arg("ranks"), without_gil,
           "`limit`: bytes of this host, of which `ranks` have equal parts; None: three quarters of what the control "
           "group allows, if it has a limit. IoError.")
      .def(
          "tensor",
          [](const Limited& self, int64_t elements, at::ScalarType dtype) {
            return offload::paged_tensor(self.disk, elements, dtype);
          },
          py::arg("elements"), py::arg("dtype"), without_gil, "[elements], zeros. IoError where there is no room.")
      .def(
          "after_step",
          [](Limited& self) { return self.limit.after_step(static_cast<int64_t>(os::recent_memory().peak)); },
          without_gil, "True once, the first time that this process needed more than its part in a step.")
      .def_property_readonly(
          "limit", [](const Limited& self) { return self.limit.bytes(); }, "Bytes of this rank.")
      .def_property_readonly("counters", [](const Limited& self) { return self.disk->counters(); })
      .def("__str__", [](const Limited& self) { return self.disk->describe(); });

  py::class_<Use>(module, "Use", "While it lives, tensors that lie on a disk are in memory.")
      .def(py::init([](const std::vector<at::Tensor>& tensors, bool changes) {
             return Use(tensors, changes ? Access::update : Access::read);
           }),
           py::arg("tensors"), py::kw_only(), py::arg("changes"), without_gil)
      .def("end", &Use::end, without_gil)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](Use& self, const py::args&) { self.end(); });

  module.def(
      "prefetch",
      [](const std::vector<at::Tensor>& tensors) {
        for (const at::Tensor& tensor : tensors) offload::prefetch(tensor);
      },
      py::arg("tensors"), without_gil, "Starts to read what lies on a disk, as far as there is room.");
  module.def("is_paged", &offload::is_paged, py::arg("tensor"), "Whether it, or what it is a view of, lies on a disk.");
  module.def(
      "copy_paged",
      [](const at::Tensor& to, const at::Tensor& from) {
        offload::copy(alias_of(to).view({-1}), alias_of(from).contiguous().view({-1}));
      },
      py::arg("to"), py::arg("source"), without_gil,
      "Block by block; `to` is contiguous, and so is what of `source` lies on a disk.");
  module.def("use_reusable_host_blocks", &offload::use_reusable_host_blocks,
             "What a step frees serves the next one; see tesserae/offload/host_blocks.h.");
  module.def("keep_freed_memory", &os::keep_freed_memory,
             "What a step frees is not given back to the system; see tesserae/os/memory.h.");
  module.def("alias_of", &alias_of, py::arg("tensor"), "The same memory as a plain tensor, whatever class it has.");
}

}  // namespace

void bind_offload(py::module_& module) {
  bind_paged_tensors(module);
  using offload::ActivationCounters;
  using offload::Activations;
  using offload::Saved;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<ActivationCounters>(module, "ActivationCounters", "Bytes; see tesserae/offload/activations.h.")
      .def_readonly("passes", &ActivationCounters::passes,
                    "Forwards whose backward has begun; several forwards before one backward are one pass.")
      .def_readonly("bytes_out", &ActivationCounters::out, "Of storages that left.")
      .def_readonly("bytes_in", &ActivationCounters::in, "Of storages that came back.")
      .def_readonly("bytes_stayed", &ActivationCounters::stayed,
                    "Of those that would have left, but are needed within the horizon of the end of the forward.")
      .def_readonly("bytes_away", &ActivationCounters::away, "Of those that are away now.")
      .def_readonly("most_bytes_away", &ActivationCounters::most_away, "The most that were away at a time.")
      .def_readonly("seconds_waited", &ActivationCounters::waited,
                    "In which the thread that computes copied, or waited for what it needs.");

  py::class_<Saved, std::shared_ptr<Saved>>(module, "Saved", "Stands for a tensor that was saved.")
      .def("take", &Saved::take, without_gil);

  py::class_<Activations, std::shared_ptr<Activations>>(
      module, "Activations", "Where activations are between forward and backward; see tesserae/offload/activations.h.")
      .def(py::init([](int horizon, const std::string& folder, int64_t smallest) {
             return Activations::make({.horizon = horizon, .smallest = smallest, .folder = folder});
           }),
           py::kw_only(), py::arg("horizon"), py::arg("folder"),
           py::arg("smallest") = offload::ActivationOptions().smallest)
      .def("put", &Activations::put, py::arg("tensor"), without_gil, "None: it stays.")
      .def_property_readonly("inside", &Activations::inside, "Whether a unit is in its forward.")
      .def_property_readonly("counters", &Activations::counters)
      .def_property_readonly("forecast", &Activations::forecast,
                             "Bytes that leave in a forward like the last that had its backward.")
      .def_property_readonly("shelf", &Activations::shelf, "Where they go; empty before anything went.");
}

}  // namespace tesserae::bindings
