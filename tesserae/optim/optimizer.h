#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tesserae/offload/paged_tensor.h"
#include "tesserae/optim/loss_scaler.h"
#include "tesserae/optim/segments.h"
#include "tesserae/optim/target.h"

namespace tesserae::optim {

/// What one step does beside the update. The same on all ranks.
struct StepOptions {
  std::optional<double> lr = {};  ///< of this step only; unset: the optimizer's own
  double clip_norm = 0;           ///< > 0: gradients are scaled to this global norm at most
  LossScaler* scaler = nullptr;   ///< the loss was scaled by it
  bool keep_gradients = true;     ///< false: nobody reads them afterwards (those on a disk need not go back there)
  /// false: nobody reads the norm. Saves the all-reduce, unless clip_norm or scaler need it. With clip_norm, and
  /// neither scaler, also_sum nor accept, shards of a device are clipped there, and the host waits for nothing:
  /// StepResult then tells neither the norm nor whether the device left the step out because it is not finite.
  bool measure_norm = true;
  /// Replaced by their sums over all ranks, in the all-reduce of the norm: what a rank knows of a step once it may
  /// update. Left alone where the norm is not measured.
  std::vector<double>* also_sum = nullptr;
  /// Asked once the norm is known, if it is finite: false leaves the step out, as a norm that is not finite does. Must
  /// answer the same on all ranks. Called on the calling thread.
  std::function<bool(double norm)> accept = {};
};

/// What a step found, the same on all ranks.
struct StepResult {
  double norm = 0;       ///< global gradient norm, unscaled and before clipping; 0 if not measured on the host
  bool skipped = false;  ///< not finite, or not accepted: no parameter and no state was changed, on any rank
};

/// Updates this rank's shards. All ranks call step() together, from the training thread.
///
/// Shards without a gradient are left alone: their state does not decay and their step counter stands still. State is
/// made when a shard has its first gradient, in the master's dtype and on its device; it may be moved out and in by
/// visit_state.
class Optimizer : public shard::Companion {
 public:
  Optimizer(std::shared_ptr<Target> target, double lr, DecayPolicy decays);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step: norm (one all-reduce), unscaling and clipping (fused into the update), update and publication shard by
  /// shard, so that the refresh of one shard overlaps with the update of the next. Gradients stay; they may hold the
  /// unscaled and clipped values afterwards.
  ///
  /// Shards of which something lies on a disk are updated later, unit by unit in the order of the next forward and
  /// beside it (Target::update_later): the same numbers, and the disk has the time of a forward. Whoever reads masters
  /// or gradients himself meanwhile calls complete_updates() first.
  StepResult step(const StepOptions& options = {});
  /// The part of step() after the norm, in which no rank waits for another: for one whose step() threw while it
  /// measured a norm that others have got. Publishes nothing.
  StepResult finish_step(double norm, const StepOptions& options);
  /// How many steps have passed the norm on this rank, by either: updated, or skipped. A step() that throws has passed
  /// it if this is one more; all of its shards are then updated. Without a norm that the host has read
  /// (StepOptions::measure_norm), what counted on a device may have been computed without a rank that was lost.
  int64_t steps_done() const { return steps_done_; }
  const StepResult& last_step() const { return last_step_; }  ///< of these
  /// Runs the updates that step() has put off, on the calling thread. Not collective.
  void complete_updates();
  /// Forgets all gradients, as Sharded::zero_grad.
  void zero_grad() { target_->zero_grad(); }

  double lr() const { return lr_; }  ///< of steps that are given none
  /// From the next step on; the same on all ranks. Throws InvalidArgument for one that is negative or no number.
  void set_lr(double lr);

  /// Calls visit for each tensor of state that exists: of the shape of the shard's master, or a scalar (named "step").
  /// `visit` may assign another tensor of that shape.
  void visit_state(
      const std::function<void(const shard::Shard& shard, std::string_view name, at::Tensor& tensor)>& visit);
  /// Memory of this rank that its state takes; what is on a disk is not.
  int64_t state_bytes() const;
  /// Makes the initial state of every shard that has none, so that a loader can fill it.
  void allocate_state();

  // State moves with the shards; see Companion. Counters stay.
  std::vector<c10::ScalarType> dtypes(const shard::Shard& shard) override;
  std::vector<at::Tensor> take(const shard::Shard& shard) override;
  void put(const shard::Shard& shard, std::vector<at::Tensor> tensors) override;

 protected:
  /// Derived classes call it in their destructors: what is still to be updated needs update().
  void end() noexcept;

  /// Views of one shard's segments of one kind: the tensor lists that a fused kernel takes.
  struct Views {
    std::vector<at::Tensor> master, grad;        ///< flat, of the same sizes: what is updated, and by what
    std::vector<std::vector<at::Tensor>> state;  ///< as in state_names()
    std::vector<at::Tensor> step;                ///< the shard's counter, once for each view
  };

  /// Names of the flat tensors of state, each of the master's shape.
  virtual const std::vector<std::string>& state_names() const = 0;
  /// What a fused kernel is told of its gradients by scalars on the device, floats.
  struct Scale {
    std::optional<at::Tensor> divisor = {};  ///< of gradients; unset: 1
    std::optional<at::Tensor> skip = {};     ///< 1: nothing is updated; unset: 0
  };

  /// Updates `views` with gradients scaled by `scale`. `decay`: weight decay applies. The counter has already been
  /// raised to this step's number.
  virtual void update(const Views& views, bool decay, double lr, const Scale& scale) = 0;

 private:
  /// Shards are as many as when this was made, or more: parameters that were unfrozen since begin without a state.
  void keep_up();
  /// What one call of update() works on: all that decays of a shard, or all that does not; where parts of the state are
  /// paged, about a block of that at a time.
  struct Run {
    bool decay = false;
    bool paged = false;
    Views views = {};

    void prefetch() const;
    offload::Use use(offload::Access gradients) const;
  };
  struct State {
    std::vector<at::Tensor> flat;
    at::Tensor step;
    // Views are made once and kept while master, gradient and state stay where they are.
    std::vector<Run> runs;
    bool paged = false;  // on all ranks alike, also where there is nothing to update
    std::vector<std::pair<const void*, int64_t>> places;
  };

  StepResult finish(double norm, const StepOptions& options, bool publish);
  void clip_on_device(const StepOptions& options);
  Scale scale_by(double divisor) const;
  void update_all(const Scale& scale, const StepOptions& options, bool publish);
  void allocate(const shard::Shard& shard, State& state) const;
  void refresh_views(const shard::Shard& shard, State& state) const;
  void add_run(const shard::Shard& shard, const State& state, const Segment& segment, Run& run) const;
  void update_shard(size_t index, std::optional<size_t> next, double lr, bool keep_gradients, const Scale& scale);

  std::shared_ptr<Target> target_;
  double lr_;
  DecayPolicy decays_;
  std::vector<State> states_;
  int64_t steps_done_ = 0;
  std::mutex updating_;    // updates run on the gather lane, and in complete_updates()
  bool deferred_ = false;  // an update was handed over since complete_updates()
  StepResult last_step_;
  std::shared_ptr<void> companion_;  // last: nobody calls a companion that is half gone
};

}  // namespace tesserae::optim
