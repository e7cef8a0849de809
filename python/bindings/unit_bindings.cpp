#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/dtensors.h"
#include "python/bindings/unit.h"
#include "tesserae/shard/activation_offload.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/whole_model.h"
#include "tesserae/tensor/parallel.h"

namespace tesserae::bindings {
namespace {

/// A function of the user's that takes part in reductions.
class PythonHook : public shard::StepObserver {
 public:
  explicit PythonHook(const py::object& hook) : hook_(new py::object(hook)) {}
  ~PythonHook() override {
    const py::gil_scoped_acquire acquire;
    hook_.reset();
  }

 protected:
  template <class... Tensors>
  void call(const Tensors&... tensors) {
    const py::gil_scoped_acquire acquire;
    (*hook_)(tensors...);
  }

 private:
  std::unique_ptr<py::object> hook_;  // behind a pointer: C++ owns it without the GIL
};

/// In place of the unit's reduction.
class PythonReduction final : public PythonHook {
 public:
  using PythonHook::PythonHook;
  bool reduces() const override { return true; }
  void reduce(const at::Tensor& whole, const at::Tensor& chunk) override {
    chunk.defined() ? call(whole, chunk) : call(whole);
  }
};

/// Sees its averages.
class PythonAdjustment final : public PythonHook {
 public:
  using PythonHook::PythonHook;
  bool adjusts() const override { return true; }
  void adjust(const at::Tensor& average) override { call(average); }
};

}  // namespace

void bind_unit(py::module_& module) {
  using shard::Options;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<Options>(module, "Options", "How a unit is sharded; see tesserae/shard/options.h.")
      .def(py::init([](const mesh::Strategy& strategy, std::optional<at::ScalarType> parameters,
                       std::optional<at::ScalarType> reduce, int limit_all_gathers, bool offload,
                       const std::string& parameter_wire, const std::string& gradient_wire,
                       const std::shared_ptr<tensor::Parallel>& parallel, bool by_rows) {
             Options options;
             options.strategy = strategy;
             options.precision.parameters = parameters;
             options.precision.reduce = reduce;
             options.precision.cast_inputs = false;
             options.elastic = true;  // what users of FSDP, and of zero_grad(set_to_none=True), count on
             options.limit_all_gathers = limit_all_gathers;
             if (offload) options.tiers = {offload::Tier::host, offload::Tier::host, offload::Tier::host};
             options.cut_by = by_rows ? shard::CutBy::rows : shard::CutBy::elements;
             options.parameter_wire = comm::wire_of(parameter_wire);
             options.gradient_wire = comm::wire_of(gradient_wire);
             if (parallel) options.mesh = parallel->mesh();
             return options;
           }),
           py::kw_only(), py::arg("strategy"), py::arg("parameters"), py::arg("reduce"), py::arg("limit_all_gathers"),
           py::arg("offload"), py::arg("parameter_wire") = "exact", py::arg("gradient_wire") = "exact",
           py::arg("parallel") = nullptr, py::arg("by_rows") = false,
           "`parallel`: among whom the unit's parameters may be split; it must outlive them. `by_rows`: each rank has "
           "whole rows of each parameter.");

  py::class_<Unit>(module, "Unit", "The parameters of one FSDP instance; see python/bindings/unit.h.")
      .def(py::init([](std::shared_ptr<comm::Fabric> fabric, Options options,
                       const std::vector<std::vector<std::string>>& names, const std::vector<at::Tensor>& compute,
                       const std::vector<std::pair<mesh::Splits, std::vector<int64_t>>>& splits,
                       const std::vector<at::Tensor>& local, const std::vector<int>& dims) {
             std::vector<Unit::Parameter> parameters;
             for (size_t i = 0; i < compute.size(); ++i) {
               parameters.push_back({names[i], compute[i]});
               if (i < splits.size()) std::tie(parameters.back().split, parameters.back().whole) = splits[i];
               if (i < local.size()) parameters.back().local = local[i];
               if (i < dims.size()) parameters.back().dim = dims[i];
             }
             return std::make_unique<Unit>(std::move(fabric), std::move(options), parameters);
           }),
           py::arg("fabric"), py::arg("options"), py::arg("names"), py::arg("compute"),
           py::arg("splits") = std::vector<std::pair<mesh::Splits, std::vector<int64_t>>>(),
           py::arg("local") = std::vector<at::Tensor>(), py::arg("dims") = std::vector<int>(), without_gil,
           "`splits`: for each parameter how it is cut, and the shape of the whole; {}: all are whole. `local`: for "
           "each parameter, which then has only a shape, the rows that this rank holds. `dims`: of which dimension.")
      .def_property_readonly("flats", &Unit::flats,
                             "For each flat buffer, which of the constructor's parameters are in it, by slot.")
      .def_property_readonly("strategy", [](const Unit& unit) { return unit.sharded().sharding().options.strategy; })
      .def_property_readonly("name", [](const Unit& unit) { return unit.sharded().name(); })
      .def_property_readonly("is_root", [](const Unit& unit) { return &unit.sharded() == &unit.engine().root(); })
      .def(
          "offload_activations",
          [](Unit& unit, const std::shared_ptr<offload::Activations>& activations) {
            unit.sharded().attach(std::make_shared<shard::ActivationOffload>(activations));
          },
          py::arg("activations"), "From now on it knows of the unit's forwards, and that parameters stay.")
      .def("adopt", &Unit::adopt, py::arg("inner"), py::arg("name"), without_gil)
      .def(
          "show_parameters",
          [](Unit& unit, const std::vector<std::vector<at::Tensor>>& parameters, bool keep_shapes) {
            std::vector<shard::UserTensors> all;
            for (const auto& tensors : parameters) all.push_back(shard::plain_tensors(tensors, keep_shapes));
            unit.show_parameters(std::move(all));
          },
          py::arg("parameters"), py::arg("keep_shapes") = false,
          "keep_shapes: where a rank holds whole parameters (O is 1) they have their shapes; else what is shown is flat.")
      .def(
          "show_dtensors",
          [](Unit& unit, const std::vector<std::vector<py::object>>& parameters, const py::object& make_gradient) {
            std::vector<shard::UserTensors> all;
            for (const auto& tensors : parameters) all.push_back(dtensors(tensors, make_gradient));
            unit.show_parameters(std::move(all));
          },
          py::arg("parameters"), py::arg("make_gradient"),
          "The same for DTensors; make_gradient(parameter, local) makes a gradient of the parameter's placement.")
      .def(
          "set_entries",
          [](Unit& unit, const std::vector<std::tuple<py::object, py::str, py::object, py::object>>& entries,
             bool while_gathered) {
            std::vector<Unit::Entry> all;
            for (const auto& [owner, name, compute, local] : entries) all.push_back({owner, name, compute, local});
            unit.set_entries(std::move(all), while_gathered);
          },
          py::arg("entries"), py::arg("while_gathered") = false,
          "(module._parameters or a module, name, compute parameter, shard) for each entry to swap; `while_gathered`: "
          "also while parameters stay gathered after the forward.")
      .def("has_replaced_entries", &Unit::has_replaced_entries,
           "Whether an entry is something else than its shard, and nothing computes with the unit.")
      .def("set_after_backward", &Unit::set_after_backward, py::arg("call"),
           "`call(numbers)` at the end of each backward that reduces the unit's gradients, with the numbers of the "
           "parameters whose gradients it has reduced; None: nothing.")
      .def("gather", &Unit::gather, "Starts to gather ahead of the forward.")
      .def("finish_gather", &Unit::finish_gather, "Waits for it; entries show whole parameters.")
      .def("release", &Unit::release, "Frees what is gathered, unless the unit computes with it.")
      .def("show_shards", &Unit::show_shards, "Entries show shards, unless the unit computes.")
      .def("forget_step", &Unit::forget_step, "Forgets a forward or backward that did not end.")
      .def(
          "set_lifetimes",
          [](Unit& unit, bool after_forward, bool after_backward) {
            unit.sharded().set_lifetimes(after_forward, after_backward);
          },
          py::kw_only(), py::arg("free_after_forward"), py::arg("free_after_backward"))
      .def(
          "set_rest_ranks", [](Unit& unit, int ranks) { unit.sharded().set_rest_ranks(ranks); }, without_gil,
          py::arg("ranks"),
          "Parameters rest over so many ranks between forward and backward; 0: over all that shard them.")
      .def(
          "set_reduces_gradients", [](Unit& unit, bool reduces) { unit.sharded().set_reduces_gradients(reduces); },
          py::arg("reduces"), "False: gradients stay on the rank, whole.")
      .def(
          "set_keeps_pieces", [](Unit& unit, bool keeps) { unit.sharded().set_keeps_pieces(keeps); }, py::arg("keeps"),
          "True: gradients that stay on the rank do so as its shards; else whole.")
      .def(
          "set_reduces_unused", [](Unit& unit, bool reduces) { unit.sharded().set_reduces_unused(reduces); },
          py::arg("reduces"), "True: parameters without a gradient on this rank count as zeros.")
      .def(
          "set_gradient_divisor", [](Unit& unit, double divisor) { unit.sharded().set_gradient_divisor(divisor); },
          py::arg("divisor"), "What sums of gradients are divided by, instead of the number of ranks.")
      .def(
          "set_master_dtype", [](Unit& unit, at::ScalarType dtype) { unit.sharded().set_master_dtype(dtype); },
          py::arg("dtype"), "Masters, gradients and optimizer state are in that dtype from the first step on.")
      .def("require_between_steps", &Unit::require_between_steps, py::arg("function"))
      .def("enter", &Unit::enter, py::arg("inputs"))
      .def("enter_again", &Unit::enter_again)
      .def("cancel", &Unit::cancel)
      .def("finish", &Unit::finish, py::arg("output"))
      .def("watch_outputs", &Unit::watch_outputs, py::arg("outputs"))
      .def("add_gradient", &Unit::add_gradient, py::arg("number"), py::arg("gradient"), without_gil,
           "In a backward: a gradient of the parameter of that number, which autograd has left elsewhere.")
      .def(
          "set_boundary", [](Unit& unit, bool boundary) { unit.engine().set_boundary(boundary); }, py::arg("boundary"))
      .def("boundary", [](const Unit& unit) { return unit.engine().boundary(); })
      .def(
          "zero_grad", [](Unit& unit) { unit.engine().zero_grad(); }, without_gil)
      .def(
          "discard_accumulated", [](Unit& unit) { unit.engine().discard_accumulated(); }, without_gil)
      .def("statistics", [](const Unit& unit) { return unit.engine().statistics(); })
      .def(
          "describe", [](const Unit& unit) { return shard::describe(unit.engine()); },
          "What the ranks must agree on, as lines of text.")
      .def(
          "require_agreement",
          [](Unit& unit) {
            shard::Engine& engine = unit.engine();
            shard::require_agreement(*engine.root().sharding().fabric, shard::describe(engine));
          },
          without_gil, "Collective: raises Mismatch unless all ranks built the same units.")
      .def(
          "set_reduce_hook",
          [](Unit& unit,
             const py::object&
                 hook) { unit.replace_reduction(hook.is_none() ? nullptr : std::make_shared<PythonReduction>(hook)); },
          py::arg("hook"))
      .def(
          "set_average_hook",
          [](Unit& unit, const py::object& hook) {
            unit.replace_reduction(hook.is_none() ? nullptr : std::make_shared<PythonAdjustment>(hook));
          },
          py::arg("hook"), "hook(average) of each buffer, on the reduce lane, before it becomes a gradient.");
}

}  // namespace tesserae::bindings
