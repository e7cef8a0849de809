#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/context.h"
#include "tesserae/shard/discover.h"
#include "tesserae/shard/flat_gradient.h"
#include "tesserae/shard/flat_parameter.h"
#include "tesserae/shard/gradient_hooks.h"
#include "tesserae/shard/schedule.h"
#include "tesserae/shard/shard.h"

namespace torch::nn {
class Module;
}

namespace tesserae::shard {

/// Decides when a unit's parameters are gathered and freed and when its gradients are reduced. It has no branch per
/// strategy: degrees and lifetimes are numbers in groups, buffers and two flags. A step:
///
///  1. before_forward(unit): gather (usually started earlier by the schedule), then start the next ones, bounded by
///     limit_all_gathers. The root's call begins the step.
///  2. after_forward(unit): free, if the lifetime says so and the schedule does not need the unit next.
///  3. before_backward(unit), from a hook on the unit's outputs: gather again and look ahead in backward order. The
///  first
///     one asks autograd to call step 5 when the backward ends.
///  4. on_gradient(): a parameter's gradient is final for this backward (hook on its AccumulateGrad node; the tensor's
///  own
///     post-accumulate slot belongs to the user). It moves into the unit's buffer; the last one of a buffer starts the
///     reduction and frees the unit.
///  5. end_backward(): reduce what is left, in unit order, the same on all ranks; wait for all reductions; free
///  everything.
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
class Engine {
 public:
  Engine(std::shared_ptr<torch::nn::Module> model, std::shared_ptr<comm::Fabric> fabric, Options options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

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
  void visit_parameters(const std::function<void(const std::string&, at::Tensor)>& visit, bool writeback);

  const std::vector<std::string>& units() const { return names_; }
  int64_t parameter_count() const;
  Statistics statistics() const;
  Context& context() { return context_; }

 private:
  struct UnitState {
    UnitBase* base = nullptr;
    std::vector<int> flats;  // indices in flats_
    bool has_frozen = false;
  };
  struct FlatState {
    std::unique_ptr<Flat> flat;
    std::vector<at::Tensor> tensors;  // the module's parameters, by slot
    std::unique_ptr<FlatParameter> parameter;
    std::unique_ptr<FlatGradient> gradient;  // null if frozen
    std::unique_ptr<GradientHooks> hooks;    // null if frozen
    int shard = -1;
  };

  void build(const std::vector<UnitSpec>& specs);
  void build_flat(int unit, const FlatSpec& spec);
  void reserve_pool();

  void begin_step();
  void abandon_step();
  void check_frozen();
  void before_backward(int unit);
  void open_backward();
  void on_gradient(int flat, int slot, const at::Tensor& gradient);
  void end_backward();

  void gather(int unit, bool backward);
  void look_ahead(bool backward);
  bool holds_buffers(int unit) const;
  void release(int unit, bool frozen_only = false);
  void release_all();
  bool frees_after_backward() const;

  void reduce(FlatState& flat);
  void limit_reductions(int most);

  std::shared_ptr<torch::nn::Module> model_;
  Context context_;
  std::vector<std::string> names_;
  std::vector<UnitState> units_;
  std::vector<FlatState> flats_;
  std::vector<Shard> shards_;
  Schedule schedule_;
  std::vector<Schedule::Use> upcoming_;
  std::deque<FlatGradient*> reductions_;  // in flight, oldest first
  std::shared_ptr<Engine*> alive_;        // hooks in a graph that outlives the engine find it empty

  bool boundary_ = true;
  bool forward_open_ = false;
  bool backward_open_ = false;
};

}  // namespace tesserae::shard
