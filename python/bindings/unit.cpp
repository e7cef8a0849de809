#include "python/bindings/unit.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"

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
  } else if (!PyType_Check(value.ptr()) && py::hasattr(value, "__dataclass_fields__")) {
    for (const auto& name : value.attr("__dataclass_fields__")) for_each_tensor(py::getattr(value, name), visit);
  } else if (py::hasattr(value, "data") && py::hasattr(value, "batch_sizes")) {  // PackedSequence
    for_each_tensor(value.attr("data"), visit);
  }
}

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
  user_parameters_->set_shows_computed(while_gathered_ && computing_);
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
  sharded().expect_forward();
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

void Unit::begin_backward(shard::ShardedUnit& /*unit*/, bool /*boundary*/) {
  reduced_.clear();
}

void Unit::before_reduce(shard::FlatBuffer& buffer) {
  if (!after_backward_) return;
  const auto& numbers = flats_[shard::index_of(buffer)];
  reduced_.insert(reduced_.end(), numbers.begin(), numbers.end());
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
  std::ranges::sort(reduced_);
  const auto repeated = std::ranges::unique(reduced_);
  reduced_.erase(repeated.begin(), repeated.end());
  after_backward_(std::exchange(reduced_, {}));
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
  backward_ = false;                                       // of one that threw
  if (unit_ != nullptr) unit_->set_gathered_early(false);  // whoever sees shards may write them
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
  if (user_parameters_) user_parameters_->set_shows_computed(while_gathered_ && computing_);
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

}  // namespace tesserae::bindings
