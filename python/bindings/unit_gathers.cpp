// What the user's Python does in gathers and reductions of a unit: extensions of parameters, and collectives.

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/gather_extension.h"
#include "tesserae/shard/user_collectives.h"

namespace tesserae::bindings {
namespace {

/// An object of Python that C++ lets go of without the GIL.
class Kept {
 public:
  explicit Kept(py::object object) : object_(new py::object(std::move(object))) {}
  ~Kept() {
    const py::gil_scoped_acquire acquire;
    object_.reset();
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  const py::object& operator*() const { return *object_; }

 private:
  std::unique_ptr<py::object> object_;
};

class PythonExtension final : public shard::GatherExtension {
 public:
  explicit PythonExtension(py::object extension) : extension_(std::move(extension)) {}

  std::vector<at::Tensor> inputs() override {
    const py::gil_scoped_acquire acquire;
    return (*extension_).attr("inputs")().cast<std::vector<at::Tensor>>();
  }
  std::vector<at::Tensor> make(const std::vector<at::Tensor>& outputs, bool first) override {
    const py::gil_scoped_acquire acquire;
    return (*extension_).attr("make")(outputs, first).cast<std::vector<at::Tensor>>();
  }

 private:
  Kept extension_;
};

using Buffers = std::vector<at::Tensor>;

/// torch.distributed.fsdp's AllGather or ReduceScatter, for buffers of one dtype at a time.
class PythonCollective : public shard::UserCollective {
 public:
  PythonCollective(py::object comm, py::object group) : comm_(std::move(comm)), group_(std::move(group)) {}

  void run(const Buffers& buffers, int index, int pieces) override {
    std::map<at::ScalarType, Buffers> by_dtype;  // in an order that is the same on all ranks
    for (const at::Tensor& buffer : buffers) {
      if (buffer.numel() == 0) continue;  // on all ranks
      by_dtype[buffer.scalar_type()].push_back(buffer.view({pieces, -1}));
    }
    for (const auto& [dtype, rows] : by_dtype) {
      int64_t piece = 0;
      for (const at::Tensor& row : rows) piece += row.size(1);
      run_packed(rows, index, pieces, piece);
    }
  }

 protected:
  virtual void run_packed(const Buffers& rows, int index, int pieces, int64_t piece) = 0;

  at::Tensor allocate(int64_t elements, const at::Tensor& like) const {
    const py::gil_scoped_acquire acquire;
    const auto memory = (*comm_)
                            .attr("allocate")(py::make_tuple(elements), py::arg("dtype") = py::cast(like.scalar_type()),
                                              py::arg("device") = py::cast(like.device()))
                            .cast<at::Tensor>();
    if (memory.numel() == elements && memory.scalar_type() == like.scalar_type() && memory.is_contiguous()) {
      return memory.view(-1);
    }
    throw InvalidArgument("FSDPModule",
                          cat("allocate() of the custom collective returned ", memory.numel(), " elements of ",
                              c10::toString(memory.scalar_type()), " where ", elements, " contiguous ones of ",
                              c10::toString(like.scalar_type()), " were asked for"));
  }

  void call(const at::Tensor& output, const at::Tensor& input, bool reduces) const {
    const py::gil_scoped_acquire acquire;
    py::dict arguments(py::arg("output_tensor") = output, py::arg("input_tensor") = input, py::arg("group") = *group_);
    if (reduces) arguments["op"] = py::module_::import("torch.distributed").attr("ReduceOp").attr("SUM");
    const py::object work = (*comm_)(**arguments);
    if (!work.is_none()) work.attr("wait")();
  }

  /// Of the rows with that index, one after the other in `packed`, or from there.
  static void pack(const Buffers& rows, int64_t index, const at::Tensor& packed) {
    int64_t begin = 0;
    for (const at::Tensor& row : rows) {
      packed.narrow(0, begin, row.size(1)).copy_(row.select(0, index));
      begin += row.size(1);
    }
  }
  static void unpack(const Buffers& rows, int64_t index, const at::Tensor& packed) {
    int64_t begin = 0;
    for (const at::Tensor& row : rows) {
      row.select(0, index).copy_(packed.narrow(0, begin, row.size(1)));
      begin += row.size(1);
    }
  }

 private:
  Kept comm_, group_;
};

class PythonGather final : public PythonCollective {
  using PythonCollective::PythonCollective;

  void run_packed(const Buffers& rows, int index, int pieces, int64_t piece) override {
    const at::Tensor output = allocate(piece * pieces, rows.front());
    const at::Tensor input = output.narrow(0, index * piece, piece);
    pack(rows, index, input);
    call(output, input, /*reduces=*/false);
    for (int i = 0; i < pieces; ++i) {
      if (i != index) unpack(rows, i, output.narrow(0, i * piece, piece));
    }
  }
};

class PythonReduceScatter final : public PythonCollective {
  using PythonCollective::PythonCollective;

  void run_packed(const Buffers& rows, int index, int pieces, int64_t piece) override {
    const at::Tensor input = allocate(piece * pieces, rows.front());
    const at::Tensor output = allocate(piece, rows.front());
    for (int i = 0; i < pieces; ++i) pack(rows, i, input.narrow(0, i * piece, piece));
    call(output, input, /*reduces=*/true);
    unpack(rows, index, output);
  }
};

void extend_gather(Unit& unit, int number, const py::object& extension) {
  for (size_t i = 0; i < unit.flats().size(); ++i) {
    if (unit.flats()[i].front() != number) continue;  // each parameter has a buffer of its own
    unit.sharded().buffers()[i]->extend(std::make_shared<PythonExtension>(extension));
  }
}

template <class Collective>
std::shared_ptr<shard::UserCollective> collective(const py::object& comm, const py::object& group) {
  return comm.is_none() ? nullptr : std::make_shared<Collective>(comm, group);
}

}  // namespace

void bind_unit_gathers(py::module_& module) {
  module.def(
      "extend_gather", &extend_gather, py::arg("unit"), py::arg("number"), py::arg("extension"),
      "`extension.inputs()` and `.make(outputs, first)` in place of the gather of the constructor's parameter of "
      "that number; see tesserae/shard/gather_extension.h. Of units that are cut by rows, before the first "
      "step.");
  module.def(
      "set_gatherer",
      [](Unit& unit, const py::object& comm, const py::object& group) {
        unit.sharded().set_gatherer(collective<PythonGather>(comm, group));
      },
      py::arg("unit"), py::arg("comm"), py::arg("group"),
      "`comm`, an AllGather of torch's FSDP2, gathers the unit's parameters; None: the engine. `group`: what it is "
      "called with.");
  module.def(
      "set_scatterer",
      [](Unit& unit, const py::object& comm, const py::object& group) {
        unit.sharded().set_scatterer(collective<PythonReduceScatter>(comm, group));
      },
      py::arg("unit"), py::arg("comm"), py::arg("group"),
      "The same of a ReduceScatter, for the sum of gradients over the ranks that shard them.");
}

}  // namespace tesserae::bindings
