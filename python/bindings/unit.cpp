#include "python/bindings/unit.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "python/bindings/dtensors.h"
#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/shard/activation_offload.h"
#include "tesserae/shard/agreement.h"
#include "tesserae/shard/whole_model.h"
#include "tesserae/tensor/parallel.h"

namespace tesserae::bindings {
namespace {

// Calls visit for each tensor in what a forward takes or returns.
template <class Visit>
void for_each_tensor(const py::handle& value, const Visit& visit) {
  if (THPVariable_Check(value.ptr())) {
    visit(THPVariable_Unpack(value.ptr()));
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& element : py::reinterpret_borrow<py::sequence>(value)) for_each_tensor(element, visit);
  } else if (PyDict_Check(value.ptr())) {  // also OrderedDict, and what is derived from it
    for (const auto& [key, element] : py::reinterpret_borrow<py::dict>(value)) for_each_tensor(element, visit);
  } else if (py::hasattr(value, "__dataclass_fields__")) {
    for (const auto& name : value.attr("__dataclass_fields__")) for_each_tensor(py::getattr(value, name), visit);
  } else if (py::hasattr(value, "data") && py::hasattr(value, "batch_sizes")) {  // PackedSequence
    for_each_tensor(value.attr("data"), visit);
  }
}

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

Unit::Unit(std::shared_ptr<comm::Fabric> fabric, shard::Options options, const std::vector<Parameter>& parameters) {
  std::vector<shard::NamedParameter> named;
  for (const auto& parameter : parameters) {
    named.push_back(
        {parameter.names, parameter.compute, parameter.split, parameter.whole, parameter.local, parameter.dim});
  }
  shard::UnitSpec spec{"", -1, this, shard::group_parameters(named, options.cut_by)};
  for (const auto& flat : spec.flats) {
    std::vector<int> order;
    for (const auto& tensor : flat.parameters) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].compute.is_same(tensor)) order.push_back(static_cast<int>(i));
      }
    }
    flats_.push_back(std::move(order));
  }
  std::vector<shard::UnitSpec> specs{std::move(spec)};
  engine_ = std::make_shared<shard::Engine>(std::move(specs), std::move(fabric), std::move(options));
  unit_->attach(std::shared_ptr<shard::StepObserver>(std::shared_ptr<void>(), this));  // which detaches itself
}

Unit::~Unit() {
  if (unit_ != nullptr) {
    unit_->detach(*this);
    unit_->forget();
  }
  if (Py_IsInitialized() == 0) return;
  // The last unit ends the engine, which waits for its lanes, where the user's Python may be waiting for the GIL.
  const py::gil_scoped_release release;
  user_parameters_ = nullptr;
  engine_ = nullptr;
}

void Unit::set_unit(shard::ShardedUnit* unit) {
  unit_ = unit;
  // Inside the engine's constructor nobody owns it yet; this class's constructor takes it.
  engine_ = unit == nullptr ? nullptr : unit->engine().weak_from_this().lock();
}

shard::ShardedUnit& Unit::sharded() const {
  if (unit_ == nullptr) throw InvalidArgument("Unit", "the engine of this unit is gone");
  return *unit_;
}

void Unit::show_parameters(std::vector<shard::UserTensors> parameters) {
  if (user_parameters_) sharded().detach(*user_parameters_);
  user_parameters_ = nullptr;
  user_parameters_ = shard::UserParameters::attach(sharded(), std::move(parameters));
}

shard::UserParameters& Unit::user_parameters() const {
  if (!user_parameters_) throw InvalidArgument("Unit", "the unit shows no parameters yet; see show_parameters");
  return *user_parameters_;
}

void Unit::replace_reduction(std::shared_ptr<shard::StepObserver> reduction) {
  if (reduction_) sharded().detach(*reduction_);
  reduction_ = nullptr;
  if (reduction) sharded().attach(reduction);
  reduction_ = std::move(reduction);
}

void Unit::adopt(Unit& inner, const std::string& name) {
  const auto theirs = inner.engine_;  // its last owner may be the handle that is about to join another engine
  engine().adopt(*theirs, name);
}

void Unit::enter(const py::handle& input) {
  for_each_tensor(input, [this](const at::Tensor& tensor) { sharded().on_input(tensor); });
  {
    const py::gil_scoped_release release;
    sharded().before_forward();
  }
  ++depth_;
  show(true);
}

void Unit::enter_again() {
  {
    const py::gil_scoped_release release;
    sharded().before_forward();
  }
  backward_ = true;
  show(true);
}

void Unit::cancel() {
  leave();
  sharded().cancel_forward();
}

void Unit::leave() {
  --depth_;
  const bool stays = while_gathered_ && !sharded().frees_after_forward() && sharded().holds_buffers();
  show(depth_ > 0 || backward_ || stays);
}

// Parameters stay in place between a unit's first gradient and the end of the backward: a forward that is recomputed
// below this unit's module reads them there.
void Unit::before_backward(shard::ShardedUnit& /*unit*/) {
  if (entries_.empty() || backward_) return;
  const py::gil_scoped_acquire acquire;
  backward_ = true;
  show(true);
}

void Unit::end_backward(shard::ShardedUnit& /*unit*/) {
  if (!backward_) return;
  const py::gil_scoped_acquire acquire;
  backward_ = false;
  show(depth_ > 0);
}

void Unit::after_backward(shard::ShardedUnit& /*unit*/) {
  if (!after_backward_) return;
  const py::gil_scoped_acquire acquire;
  after_backward_();
}

void Unit::set_after_backward(py::object call) {
  after_backward_ = call.is_none() ? py::object() : std::move(call);
}

void Unit::after_free(shard::ShardedUnit& /*unit*/) {
  if (!while_gathered_ || !computing_ || depth_ > 0 || backward_) return;
  const py::gil_scoped_acquire acquire;
  show(false);
}

void Unit::set_entries(std::vector<Entry> entries, bool while_gathered) {
  entries_ = std::move(entries);
  while_gathered_ = while_gathered;
}

bool Unit::has_replaced_entries() const {
  if (computing_) return false;
  return std::ranges::any_of(entries_, [](const Entry& entry) {
    if (!PyDict_Check(entry.owner.ptr())) return !py::getattr(entry.owner, entry.name, entry.local).is(entry.local);
    const PyObject* now = PyDict_GetItemWithError(entry.owner.ptr(), entry.name.ptr());
    return now != nullptr && now != entry.local.ptr();
  });
}

void Unit::gather() {
  const py::gil_scoped_release release;
  engine().gather_early(sharded());
}

void Unit::finish_gather() {
  {
    const py::gil_scoped_release release;
    sharded().finish_gather();
  }
  if (sharded().holds_newest()) show(true);
}

void Unit::release() {
  if (depth_ > 0 || backward_) return;
  {
    const py::gil_scoped_release release;
    engine().release(sharded());
  }
  show(false);
}

void Unit::show_shards() {
  if (depth_ > 0 || autograd::in_backward()) return;
  backward_ = false;  // of one that threw
  show(false);
}

void Unit::forget_step() {
  depth_ = 0;
  backward_ = false;
  show(false);
}

void Unit::require_between_steps(const std::string& function) {
  if (depth_ > 0 || autograd::in_backward()) {
    throw InvalidArgument(function, cat("called inside a ", depth_ > 0 ? "forward of unit \"" : "backward of unit \"",
                                        sharded().name(), "\"; call it between steps"));
  }
  end_backward(sharded());
}

void Unit::show(bool compute) {
  if (compute == computing_) return;
  computing_ = compute;
  for (const auto& entry : entries_) {
    PyObject* value = compute ? entry.compute.ptr() : entry.local.ptr();
    const int failed = PyDict_Check(entry.owner.ptr()) ? PyDict_SetItem(entry.owner.ptr(), entry.name.ptr(), value)
                                                       : PyObject_SetAttr(entry.owner.ptr(), entry.name.ptr(), value);
    if (failed != 0) throw py::error_already_set();
  }
}

void Unit::finish(const py::handle& output) {
  leave();
  {
    const py::gil_scoped_release release;
    sharded().after_forward();
  }
  watch_outputs(output);
}

void Unit::watch_outputs(const py::handle& output) {
  for_each_tensor(output, [this](const at::Tensor& tensor) { sharded().on_output(tensor); });
}

void Unit::add_gradient(int number, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;  // the gradient may have a graph of its own
  for (size_t i = 0; i < flats_.size(); ++i) {
    const auto found = std::ranges::find(flats_[i], number);
    if (found == flats_[i].end()) continue;
    engine().on_gradient(*sharded().buffers()[i], static_cast<int>(found - flats_[i].begin()), gradient);
  }
}

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
      .def("same_engine", [](const Unit& a, const Unit& b) { return &a.engine() == &b.engine(); })
      .def("adopt", &Unit::adopt, py::arg("inner"), py::arg("name"), without_gil)
      .def(
          "show_parameters",
          [](Unit& unit, const std::vector<std::vector<at::Tensor>>& parameters) {
            std::vector<shard::UserTensors> all;
            for (const auto& tensors : parameters) all.push_back(shard::plain_tensors(tensors));
            unit.show_parameters(std::move(all));
          },
          py::arg("parameters"))
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
           "`call()` at the end of each backward that has reduced the unit's gradients; None: nothing.")
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
