#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/companion.h"
#include "tesserae/shard/pool_plan.h"
#include "tesserae/shard/resharding.h"
#include "tesserae/shard/schedule.h"
#include "tesserae/shard/sharded_unit.h"

namespace tesserae::shard {

/// Keeps the order of units and decides when each gathers, frees and reduces. It does not branch on the strategy:
/// degrees and lifetimes are numbers in groups, buffers and two flags; nor on features: what watches or replaces a step
/// attaches to units (StepObserver). engine.cpp opens with the protocol of a step.
///
/// After a backward that threw, the next forward of the root waits for the lanes, drops all gradients and starts clean;
/// after a forward that threw it frees what was gathered. A comm::CommError is for good: its lane runs no more tasks.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  enum class Phase {
    setup,      ///< no pool yet: prepare() or the first step reserves it
    idle,       ///< in neither: between steps, and between the root's forward and its backward
    forward,    ///< inside the root's forward
    backward,   ///< from the first node of a backward to its end
    torn,       ///< a change of degrees is under way, or failed half-way: nothing can be computed
    rejoining,  ///< groups are being made anew (Rejoin), or could not be: values are there, and wait for the next try
  };

  /// specs[0] is the root; `owner` is kept alive. Collective: makes groups; with sync_module_states also broadcasts.
  Engine(std::vector<UnitSpec> specs, std::shared_ptr<comm::Fabric> fabric, Options options,
         std::shared_ptr<void> owner = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes over the units of `inner`, made first for an inner part of the model (FSDP's nested constructors) and empty
  /// afterwards; each keeps its sharding. `name`: where its root lies in this one's. Throws InvalidArgument if either
  /// has run a step already.
  void adopt(Engine& inner, const std::string& name);
  /// Makes shared copies and reserves the pool, as the first step does otherwise. Collective.
  void prepare();
  bool prepared() const { return phase_ != Phase::setup; }  ///< false only before prepare()
  Phase phase() const { return phase_; }

  /// For who may outlive it: empty once the engine is gone, whoever owned it.
  std::weak_ptr<Engine*> alive() const { return alive_; }

  // The events of a step. Called by units, on the thread that computes or autograd's.
  void before_forward(ShardedUnit& unit);
  void after_forward(ShardedUnit& unit);
  void cancel_forward(ShardedUnit& unit);  ///< it threw
  void before_backward(ShardedUnit& unit);
  void after_input_gradient(ShardedUnit& unit);
  void on_gradient(FlatBuffer& buffer, int slot, const at::Tensor& gradient);
  at::Tensor gradient_destination(FlatBuffer& buffer, int slot);

  /// False between no_sync() and its end: backwards are not the last of an accumulation.
  void set_boundary(bool boundary) { boundary_ = boundary; }
  bool boundary() const { return boundary_; }

  // What there is, in an order that is the same on all ranks.
  const std::vector<std::unique_ptr<ShardedUnit>>& units() const { return units_; }
  ShardedUnit& root() const { return *units_.front(); }  ///< not once another engine has adopted this one
  const std::vector<FlatBuffer*>& buffers() const { return buffers_; }  ///< of all units
  const ShardList& shards() const { return shards_; }                   ///< of buffers that are not frozen
  Statistics statistics() const;

  // Between steps.
  /// Starts to gather a unit's newest values ahead of its forward, which will not look for newer ones;
  /// ShardedUnit::finish_gather() waits for them. Collective.
  void gather_early(ShardedUnit& unit);
  /// Frees what is gathered of a unit, whatever its lifetimes say. Collective.
  void release(ShardedUnit& unit);
  /// See ShardedUnit; the same shards on all ranks.
  void update_later(int shard, std::function<void()> update);
  void complete_updates();
  void publish(int shard);  ///< collective where P and O differ, in the same order on all ranks
  void zero_grad();
  void discard_accumulated();  ///< what is not reduced yet; final gradients stay
  void take_gradients();       ///< what was done to gradients outside; see StepObserver
  void show_gradients();
  /// Degrees and tiers, as they are asked for of all units.
  Setting setting() const { return {root().sharding().layout.degrees(), root().sharding().options.tiers}; }
  /// See reshard.h; collective over the job. The first: on the tiers that there are.
  Resharding reshard(const mesh::Degrees& degrees);
  Resharding turn(const Setting& setting, std::shared_ptr<offload::Disk> disk = nullptr);
  /// `companion` moves along with the shards until the handle that is returned is dropped, which may be after the
  /// engine's end. An engine that adopts another does not take over its companions.
  std::shared_ptr<void> add_companion(Companion& companion);
  const std::vector<Companion*>& companions() const { return companions_; }
  void require_not_torn() const;  ///< throws comm::CommError after a change of degrees that failed half-way

 private:
  friend class Reshard;  // settles, enters and leaves Phase::torn, replaces the pool, moves companions
  friend class Rejoin;   // forgets a step, enters and leaves Phase::rejoining, replaces the pool, copies companions

  void enter(Phase next);
  void list_buffers();
  void reserve_pool();
  void reserve(const std::vector<PoolPart>& parts);
  std::vector<PoolPart> plan_of_pool() const;
  void begin_step();
  void begin_alone(ShardedUnit& unit);
  void thaw();
  void abandon_step();
  void gather(ShardedUnit& unit, bool backward);
  void look_ahead(bool backward);
  bool keeps_freed_memory() const;
  void free(ShardedUnit& unit) { unit.free(keeps_freed_memory()); }
  void free_all();
  bool frees_after_backward(const ShardedUnit& unit) const;
  void finish_reading();
  void wait_for_copies();
  void open_backward();
  void end_backward();
  void close_backward();
  bool is_boundary(const ShardedUnit& unit) const { return boundary_ && unit.reduces_gradients(); }
  bool reduces_now(const ShardedUnit& unit) const;
  void reduce(ShardedUnit& unit, bool boundary);
  void wait_for_reductions(int most);
  void settle();
  void drain();

  std::shared_ptr<void> owner_;
  std::shared_ptr<Workspace> workspace_;
  std::vector<std::unique_ptr<ShardedUnit>> units_;
  std::vector<FlatBuffer*> buffers_;
  ShardList shards_;
  std::vector<Companion*> companions_;
  Schedule schedule_;
  std::vector<Schedule::Use> upcoming_;
  std::deque<ShardedUnit*> reductions_;  // in flight, oldest first
  std::shared_ptr<Engine*> alive_;       // callbacks that outlive the engine find it empty
  Phase phase_ = Phase::setup;
  Phase around_backward_ = Phase::idle;  // where the end of the backward returns to
  bool makes_graph_ = false;             // the backward at hand, or the last one: create_graph
  bool boundary_ = true;
};

}  // namespace tesserae::shard
