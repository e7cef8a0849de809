#pragma once

#include <ATen/core/Tensor.h>

namespace tesserae::shard {

class FlatBuffer;
class ShardedUnit;

/// What watches the steps of units, or takes part in them, without the engine knowing what it is: the user's own
/// parameters (user_parameters.h), a communication hook, a stopwatch (monitor/step_timer.h). ShardedUnit::attach makes
/// it one of the unit's; it stays with the unit when another engine adopts it and when degrees change.
///
/// Called on the thread that computes, or in a backward on autograd's, in the order of attachment, one event at a time;
/// reduce() and adjust() alone are called on the reduce lane, beside the others. What an event of a step throws ends
/// the step; what before_recut() or after_recut() throws leaves the model torn. An event neither attaches nor detaches
/// observers.
class StepObserver {
 public:
  virtual ~StepObserver() = default;

  // The events of a step, about in their order. "All": of every unit of the engine, one after the other. A forward that
  // throws has no after_forward, one that is recomputed in a backward neither: begin_step and end_backward are where to
  // give up what before_forward took.

  /// All: a forward of the root begins, nothing is gathered for it yet. `accumulating`: gradients of earlier backwards
  /// wait for their reduction.
  virtual void begin_step(ShardedUnit& /*unit*/, bool /*accumulating*/) {}
  /// The unit's forward begins, and no forward of the root is around it.
  virtual void begin_alone(ShardedUnit& /*unit*/) {}
  /// The unit's forward begins (also one that is recomputed in a backward); its parameters are about to be gathered.
  virtual void before_forward(ShardedUnit& /*unit*/) {}
  /// The training thread needs the unit's parameters ...
  virtual void before_gather(ShardedUnit& /*unit*/) {}
  /// ... and has them.
  virtual void after_gather(ShardedUnit& /*unit*/) {}
  virtual void after_forward(ShardedUnit& /*unit*/) {}
  /// All: a backward begins that reduces to the end (`boundary`) or accumulates.
  virtual void begin_backward(ShardedUnit& /*unit*/, bool /*boundary*/) {}
  /// The unit's parameters are there and about to be read in a backward, by gradients or by a recomputed forward.
  virtual void before_backward(ShardedUnit& /*unit*/) {}
  /// A buffer's gradients start their way to their owners.
  virtual void before_reduce(FlatBuffer& /*buffer*/) {}
  /// The unit's gathered parameters have been freed, for whatever reason.
  virtual void after_free(ShardedUnit& /*unit*/) {}
  /// All: the backward is over, or one that was cut short has been forgotten.
  virtual void end_backward(ShardedUnit& /*unit*/) {}

  /// Each whose gradients were reduced: they are shown, and nothing of the step is left to do.
  virtual void after_backward(ShardedUnit& /*unit*/) {}

  // The training state outside of the engine. All.

  /// Masters are about to be read: copy in what was changed outside.
  virtual void take_values(ShardedUnit& /*unit*/) {}
  /// The same for gradients, before they are added to, scaled or moved ...
  virtual void take_gradients(ShardedUnit& /*unit*/) {}
  /// ... and afterwards: show Shard::grad outside.
  virtual void show_gradients(ShardedUnit& /*unit*/) {}
  /// What this rank holds of a buffer is about to be replaced: drop every reference to it ...
  virtual void before_recut(FlatBuffer& /*buffer*/) {}
  /// ... and has been.
  virtual void after_recut(FlatBuffer& /*buffer*/) {}
  /// Ranks of which some are new go on: the unit's values are those of the ranks that were left.
  virtual void after_rejoin(ShardedUnit& /*unit*/) {}
  /// A buffer's master has another dtype and other memory, and no gradient.
  virtual void after_cast(FlatBuffer& /*buffer*/) {}

  // The reduction of gradients.

  /// True: reduce() takes the place of all three hops. One such observer a unit, and only where P = G = O, being 1 or
  /// the number of ranks, with Accumulation::local.
  virtual bool reduces() const { return false; }
  /// Gets a flat buffer of whole gradients and, unless every rank keeps all of it (O = 1), a tensor for this rank's
  /// chunk; leaves the average there (O = 1: in the first). Called on the reduce lane.
  virtual void reduce(const at::Tensor& /*whole*/, const at::Tensor& /*chunk*/) {}

  /// True: adjust() sees each average. One such observer a unit.
  virtual bool adjusts() const { return false; }
  /// Gets this rank's chunk of a buffer's average, in the reduce dtype, before it is added to Shard::grad, and may
  /// change it. Called on the reduce lane. Not where an observer reduces.
  virtual void adjust(const at::Tensor& /*average*/) {}
};

}  // namespace tesserae::shard
