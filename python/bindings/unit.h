#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/engine.h"
#include "tesserae/shard/unit_handle.h"
#include "tesserae/shard/user_parameters.h"
#include "tesserae/shard/user_tensor.h"

namespace tesserae::bindings {

namespace py = pybind11;

/// A unit whose module lives in Python: one FSDP instance. It has an engine of its own until another unit adopts it.
///
/// Called with the GIL held from the thread that computes, which is also autograd's for the hooks (they need no GIL).
/// What waits for other ranks releases the GIL.
class Unit final : public shard::UnitHandle, public shard::StepObserver {
 public:
  /// One parameter of the unit: what the module computes with, under all of its names (from this unit's module down).
  struct Parameter {
    std::vector<std::string> names;
    at::Tensor compute;
    mesh::Splits split = {};          ///< which part of a larger tensor it is
    std::vector<int64_t> whole = {};  ///< the shape of that tensor; {}: it is whole
    at::Tensor local = {};            ///< shard::NamedParameter::local
    int dim = 0;                      ///< shard::Slot::dim
  };
  /// An entry of a module that shows the compute parameter inside the unit's forward and backward, the shard outside.
  struct Entry {
    py::object owner;  ///< a module's _parameters, or a module that overrides setattr
    py::str name;
    py::object compute;
    py::object local;
  };

  /// Shards `parameters`: their values are taken, and they are views of the gathered buffer from then on.
  Unit(std::shared_ptr<comm::Fabric> fabric, shard::Options options, const std::vector<Parameter>& parameters);
  ~Unit() override;

  void set_unit(shard::ShardedUnit* unit) override;
  bool has_unit() const override { return unit_ != nullptr; }

  /// Throw InvalidArgument where the engine is gone.
  shard::ShardedUnit& sharded() const;
  shard::Engine& engine() const { return sharded().engine(); }
  /// Which of the constructor's parameters are in the unit's flat buffer of that number, by slot.
  const std::vector<std::vector<int>>& flats() const { return flats_; }
  void adopt(Unit& inner, const std::string& name);

  /// Between steps entries show shards, also after a backward that threw. Throws InvalidArgument, in the name of
  /// `function`, inside a forward of the unit or a backward.
  void require_between_steps(const std::string& function);

  void begin_backward(shard::ShardedUnit& unit, bool boundary) override;
  void before_backward(shard::ShardedUnit& unit) override;
  void before_reduce(shard::FlatBuffer& buffer) override;
  void end_backward(shard::ShardedUnit& unit) override;

  void after_free(shard::ShardedUnit& unit) override;
  void after_backward(shard::ShardedUnit& unit) override;

  /// The user's tensors show the unit's shards from now on: one list for each of its flat buffers.
  void show_parameters(std::vector<shard::UserTensors> parameters);
  /// What shows them. Throws InvalidArgument before show_parameters().
  shard::UserParameters& user_parameters() const;
  /// The user's hook: takes the place of the unit's reduction, or sees its averages; null: there is none.
  void replace_reduction(std::shared_ptr<shard::StepObserver> reduction);

  /// `while_gathered`: entries show compute parameters as long as they are gathered, too, where the unit's lifetime
  /// keeps them after its forward (FSDP2); else only while the unit computes (FSDP1).
  void set_entries(std::vector<Entry> entries, bool while_gathered);
  /// Whether the user has put something else in the place of a shard, between steps.
  bool has_replaced_entries() const;
  /// Called at the end of each backward that has reduced the unit's gradients; None: nothing is.
  void set_after_backward(py::object call);
  /// Gathers ahead of the forward; finish_gather() waits, and shows the compute parameters.
  void gather();
  void finish_gather();
  /// Frees what is gathered; entries show shards. Nothing inside a forward or backward of the unit.
  void release();
  /// Entries show shards, unless the unit computes; what is gathered stays so.
  void show_shards();
  /// A forward or backward that did not come to its end is forgotten: entries show shards.
  void forget_step();
  /// The beginning of a forward of `input` (as finish's output, and watched for the end of the unit's backward):
  /// parameters are there, entries swapped. finish() or cancel() follows.
  void enter(const py::handle& input);
  /// The end of a forward that returned `output`: finds its tensors (in tuples, lists, dictionaries and dataclasses).
  void finish(const py::handle& output);
  /// A forward that is recomputed in a backward: entries show parameters until that ends.
  void enter_again();
  /// The end of a forward that threw.
  void cancel();
  /// Watches where the backward of the unit begins: part of finish().
  void watch_outputs(const py::handle& output);
  /// A gradient of the constructor's parameter of that number which autograd does not find by itself: part of a
  /// backward.
  void add_gradient(int number, const at::Tensor& gradient);

 private:
  void leave();
  void show(bool compute);

  shard::ShardedUnit* unit_ = nullptr;
  std::shared_ptr<shard::Engine> engine_;  // which owns the unit
  std::shared_ptr<shard::UserParameters> user_parameters_;
  std::shared_ptr<shard::StepObserver> reduction_;
  std::vector<std::vector<int>> flats_;
  std::vector<Entry> entries_;
  py::object after_backward_;
  std::vector<int> reduced_;  // of the constructor's parameters, in this backward; if somebody asks
  int depth_ = 0;             // of the unit's forward within itself
  bool backward_ = false;     // the unit has begun its backward
  bool computing_ = false;    // entries show compute parameters
  bool while_gathered_ = false;
};

void bind_unit(py::module_& module);
void bind_unit_gathers(py::module_& module);
void bind_flat(py::module_& module);
void bind_reshard(py::module_& module);

}  // namespace tesserae::bindings
