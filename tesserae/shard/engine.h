#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/autograd/gradient_hooks.h"
#include "tesserae/shard/companion.h"
#include "tesserae/shard/context.h"
#include "tesserae/shard/discover.h"
#include "tesserae/shard/flat_gradient.h"
#include "tesserae/shard/flat_parameter.h"
#include "tesserae/shard/local_parameters.h"
#include "tesserae/shard/resharding.h"
#include "tesserae/shard/schedule.h"
#include "tesserae/shard/shard.h"

namespace tesserae::shard {

/// Decides when a unit's parameters are gathered and freed and when its gradients are reduced. It has no branch per
/// strategy: degrees and lifetimes are numbers in groups, buffers and two flags. A step:
///
///  1. before_forward(unit): gather (usually started earlier by the schedule), then start the next ones, bounded by
///     limit_all_gathers. The root's call begins the step.
///  2. after_forward(unit): free, if the lifetime says so and the schedule does not need the unit next.
///  3. before_backward(unit), from a hook on the unit's outputs: gather again and look ahead in backward order. The
///     first one asks autograd to call step 5 when the backward ends.
///  4. on_gradient(): a parameter's gradient is final for this backward (hook on its AccumulateGrad node; the tensor's
///     own post-accumulate slot belongs to the user). It moves into the unit's buffer, unless it was computed there
///     (autograd::gradient_place); the last one of a buffer starts the reduction and frees the unit.
///  5. end_backward(): reduce what is left, in unit order, the same on all ranks; wait for all reductions; free
///     everything.
///
/// [Note: completion] A buffer may complete zero, one or several times in a backward; each completion reduces and adds.
/// A forward that happens during a backward (recomputation) only gathers: its after_forward may never come.
///
/// Exceptions: whatever throws in a step leaves the engine usable. The next forward of the root notices that a step was
/// cut short, waits for the lanes, forgets all gradients (as zero_grad does) and starts clean.
///
/// Frozen parameters have no gradients and are freed when the gradient of the unit's inputs is there, or in step 5.
/// Making one trainable after sharding is an error at the next forward; making a trainable one frozen lets its gradient
/// count as zero.
///
/// Engines can be joined: one that is made for an inner part of a model first (FSDP's nested constructors) is adopted
/// by the one around it later. Each unit keeps the options, and so the groups, that it was made with; the pool is the
/// root's and reserved at the first step.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  /// `units`: units[0] is the root. Their handles outlive the engine or call forget(). `owner` is kept alive. Makes
  /// groups and, with sync_module_states, broadcasts; otherwise no collective.
  Engine(std::vector<UnitSpec> units, std::shared_ptr<comm::Fabric> fabric, Options options,
         std::shared_ptr<void> owner = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes over the units of `inner`, which is empty afterwards; `name`: where its root lies in this one's. Throws
  /// InvalidArgument if either has run a step already.
  void adopt(Engine& inner, const std::string& name);
  /// The handle of that unit is about to go.
  void forget(int unit) { units_[static_cast<size_t>(unit)].handle = nullptr; }
  /// Makes shared copies and reserves the pool, so that peak memory is known; otherwise the first step does.
  /// Collective.
  void prepare();

  // The events of a unit, by index in units(). Called on the thread that computes.
  void before_forward(int unit);
  void after_forward(int unit);
  at::Tensor on_input(int unit, const at::Tensor& input);
  void on_output(int unit, const at::Tensor& output);

  /// False between no_sync() and its end: backwards are not the last of an accumulation.
  void set_boundary(bool boundary) { boundary_ = boundary; }
  bool boundary() const { return boundary_; }

  std::vector<Shard>& shards() { return shards_; }
  void publish(int shard);
  void zero_grad();
  /// Forgets what was accumulated and not reduced yet; final gradients stay.
  void discard_accumulated();
  void visit_parameters(const std::function<void(const std::string&, at::Tensor)>& visit, bool writeback);

  /// The user's tensors show the shards of a unit from now on: one list for each of its flat buffers, as
  /// LocalParameters takes them. Then every forward of the root outside an accumulation publishes all shards first,
  /// since nobody tells when an optimizer has changed them.
  void show_parameters(int unit, const std::vector<std::vector<at::Tensor>>& parameters);

  /// Keeps the masters of a unit (and so gradients and optimizer state) in `dtype` from now on; what is computed with
  /// keeps its own. Before the first step, else InvalidArgument.
  void set_master_dtype(int unit, c10::ScalarType dtype);

  /// Turns the dial: from now on the training state is sharded by `degrees`, in all units. Values stay what they are,
  /// bit by bit: masters, gradients, frozen parameters and what companions keep move to their new owners, straight from
  /// ranks that have them and no more than is lacking; gathered copies and the pool are made anew. Lifetimes stay; one
  /// that never freed because P was 1 frees after forward and after backward now. reshard.cpp opens with the protocol.
  ///
  /// Between steps, also in the middle of an accumulation: what was accumulated inside no_sync is then brought to its
  /// owners first. Collective over the job. Throws, with nothing changed: InvalidArgument for impossible degrees,
  /// inside a backward, or with a reduce hook that can not stand for them; comm::Mismatch if ranks ask for different
  /// degrees or hold different state; OutOfMemory on all ranks if one host or device can not hold the new parts. A
  /// CommError (a lost peer, or memory that could not be allocated after all) leaves the model between two layouts:
  /// every later step throws, and the job goes on from its last checkpoint.
  Resharding reshard(const mesh::Degrees& degrees);

  /// `companion` moves along with the shards until what is returned is dropped, which may be after the engine. Of the
  /// root: an engine that adopts another does not take over its companions.
  std::shared_ptr<void> attach(Companion& companion);

  /// What the user did to `.grad` since, and the reverse; see LocalParameters.
  void take_gradients();
  void show_gradients();

  /// One flat buffer of a unit; gradient and local are null if there are none.
  struct FlatView {
    const Flat& flat;
    FlatParameter& parameter;
    FlatGradient* gradient;
    LocalParameters* local;
    Shard* shard;
  };
  int flats_of(int unit) const { return static_cast<int>(units_[static_cast<size_t>(unit)].flats.size()); }
  FlatView flat_of(int unit, int index);
  /// All of them, unit by unit: the same order on all ranks.
  void visit_flats(const std::function<void(int unit, const FlatView& view)>& visit);

  // Over all ranks of the fabric (the data-parallel ranks), on the control lane.
  double sum_over_ranks(double value);
  double max_over_ranks(double value);
  /// How many ranks hold the same chunk as this one of that shard.
  int replicas(int shard) const;

  /// Strategies, units, parameters: what ranks must agree on, as lines.
  std::string describe() const;
  std::string unit_name(int unit) const { return units_[static_cast<size_t>(unit)].name; }
  int unit_count() const { return static_cast<int>(units_.size()); }
  int64_t parameter_count() const;  ///< of the whole model, split parameters included
  Statistics statistics() const;
  /// That of the root, or of another unit.
  Context& context(int unit = 0) { return *units_[static_cast<size_t>(unit)].context; }
  const Context& context(int unit = 0) const { return *units_[static_cast<size_t>(unit)].context; }

 private:
  struct UnitState {
    std::string name;
    UnitHandle* handle = nullptr;
    std::shared_ptr<Context> context;
    std::vector<int> flats;  // indices in flats_
    bool has_frozen = false;
    int forwards = 0;  // with gradients, since the last backward
  };
  struct FlatState {
    int unit = 0;
    std::unique_ptr<Flat> flat;
    std::vector<at::Tensor> tensors;  // the module's parameters, by slot
    std::unique_ptr<FlatParameter> parameter;
    std::unique_ptr<FlatGradient> gradient;          // null if frozen
    std::unique_ptr<autograd::GradientHooks> hooks;  // null if frozen
    std::unique_ptr<LocalParameters> local;          // null unless show_parameters was called
    int shard = -1;
  };

  void build(const std::vector<UnitSpec>& specs, const std::shared_ptr<Context>& context);
  void build_flat(int unit, const FlatSpec& spec);
  void connect_gradients(int flat);
  void reserve_pool();

  void begin_step();
  void publish_unit(int unit);
  bool accumulating() const;
  void finish_reading();
  void drain();
  void abandon_step();
  void check_parameters();
  void drop_gradients();
  void before_backward(int unit);
  void open_backward();
  void on_gradient(int flat, int slot, const at::Tensor& gradient);
  at::Tensor place_of_gradient(int flat, int slot);
  void end_backward();
  void close_backward();

  void gather(int unit, bool backward);
  void look_ahead(bool backward);
  bool holds_buffers(int unit) const;
  bool gathers_ahead() const;
  void release(int unit, bool frozen_only = false);
  void release_all();
  void release_after_backward();
  bool reduces_now() const;
  bool frees_after_backward(int unit) const;

  void reduce(FlatState& flat);

  void require_resharding(const mesh::Degrees& degrees) const;
  void require_possible(const mesh::Degrees& degrees) const;
  void require_whole() const {
    if (torn_) throw_torn();
  }
  [[noreturn]] void throw_torn() const;
  void settle();
  std::vector<bool> gradients_of_all();
  std::vector<std::shared_ptr<Context>> contexts_for(const mesh::Degrees& degrees) const;
  void require_memory(const std::vector<bool>& gradients);
  void require_place(c10::Device place, double mine) const;
  int64_t bytes_of(const FlatState& state, const Flat& flat, bool has_gradient) const;
  uint64_t recut(FlatState& state, Context& context, bool has_gradient);
  void require_all(const std::string& failure, const std::string& what) const;
  void limit_reductions(int most);

  std::shared_ptr<void> owner_;
  std::vector<UnitState> units_;
  std::vector<FlatState> flats_;
  std::vector<Shard> shards_;
  Schedule schedule_;
  std::vector<Schedule::Use> upcoming_;
  std::deque<FlatGradient*> reductions_;  // in flight, oldest first
  std::shared_ptr<Engine*> alive_;        // hooks in a graph that outlives the engine find it empty

  std::vector<Companion*> companions_;
  std::vector<std::shared_ptr<Context>>
      next_contexts_;  // by unit, while degrees change: flats that were recut use them

  bool shows_parameters_ = false;
  bool prepared_ = false;
  bool boundary_ = true;
  bool forward_open_ = false;
  bool backward_open_ = false;
  bool torn_ = false;  // a change of degrees failed half-way
};

}  // namespace tesserae::shard
