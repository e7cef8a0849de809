#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/shard/deferred_update.h"
#include "tesserae/shard/flat_buffer.h"
#include "tesserae/shard/sharding.h"
#include "tesserae/shard/step_observer.h"
#include "tesserae/shard/unit_handle.h"

namespace tesserae::shard {

class Engine;

/// A unit on this rank: it owns its flat buffers, knows over which ranks and how it is sharded, and what its module is
/// doing. It gathers and frees its parameters when it is told to, and its buffers reduce; the engine decides when.
///
/// Used from the thread that computes, and in a backward from autograd's.
class ShardedUnit {
 public:
  /// What the unit's module does. A unit used inside itself stays in its forward until the outermost call ends, and a
  /// forward that is recomputed in a backward does not leave it.
  enum class Phase {
    idle,      ///< neither; parameters may still be gathered
    forward,   ///< between before_forward() and after_forward()
    backward,  ///< from the first node of its backward to the end of the whole backward
  };

  /// `handle`, the side of the unit's module, outlives the unit or calls forget().
  ShardedUnit(Engine& engine, int index, const UnitSpec& spec, UnitContext context);
  ~ShardedUnit();
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  Engine& engine() const { return *engine_; }
  int index() const { return index_; }  ///< in Engine::units(), the same on all ranks; 0 is the root
  const std::string& name() const { return name_; }
  /// For what is done of it in this step; `which`: with which of its buffers (a hash).
  comm::Label label(uint32_t which = 0) const;
  const std::vector<std::unique_ptr<FlatBuffer>>& buffers() const { return buffers_; }
  const UnitContext& context() const { return context_; }
  const Sharding& sharding() const { return *context_.sharding; }
  Phase phase() const { return phase_; }

  // The events of a step, from the unit's module; engine.cpp opens with the protocol.
  void before_forward();
  void after_forward();
  void cancel_forward();                         ///< in place of after_forward() where the forward threw
  void expect_forward();                         ///< inputs come now, and then before_forward(); else after that
  at::Tensor on_input(const at::Tensor& input);  ///< casts, and watches for the end of the unit's backward
  void on_output(const at::Tensor& output);      ///< watches for the beginning of the unit's backward

  // Parameters. start_gather() never waits; finish_gather() returns when they can be read. After what the user's code
  // throws in either, nothing is gathered, and the next gather begins anew.
  void start_gather();
  void finish_gather();
  bool holds_buffers() const;  ///< true from start_gather() to free(), unless its parameters are always whole
  bool holds_newest() const;   ///< the same, and masters have not changed since
  bool arriving() const;       ///< true from start_gather() to finish_gather()
  /// Before free(), at the end of a forward: see set_rest_ranks().
  void rest();
  bool lacks_buffers() const;  ///< true if a gather would take a buffer of the pool
  bool follows() const;        ///< nothing of it is trained, in a model that is: the model's forward may write it
  /// Gives gathered parameters up: all, those of frozen buffers, or those of one buffer. `keep`: Pool::release().
  /// Throws std::logic_error inside the unit's forward.
  void free(bool keep);
  void free_frozen(bool keep);
  void free(FlatBuffer& buffer, bool keep);
  /// Masters have changed, all or those of some of its buffers: the next forward sees them. Never waits; collective
  /// where P and O differ.
  void publish();
  void publish(const std::vector<FlatParameter*>& parameters);
  /// The buffer's master will have changed once `update` has run: it does on the gather lane, before what is gathered
  /// of the unit next travels, so that it and what it waits for (a disk) run beside the forward of the units before.
  void update_later(FlatBuffer& buffer, std::function<void()> update);
  /// Returns when all of those have run; those that nobody has come to yet do so here. What they changed is published
  /// by the next gather. No collective; the training thread, or autograd's while that one waits.
  void complete_updates();
  /// The same, and the next gather does not publish: everything is published anyway, on all ranks.
  void forget_updates();
  /// What is gathered was asked for ahead of the forward (Engine::gather_early), and is what that will see.
  bool gathered_early() const { return gathered_early_; }
  void set_gathered_early(bool early) { gathered_early_ = early; }

  // Gradients: those of a unit travel together. `boundary`: to their owners; else no further than over G.
  bool has_all_gradients() const;           ///< each of its trainable parameters has had one in this backward
  bool has_gradients(bool boundary) const;  ///< there is something to reduce
  void reduce_gradients(bool boundary);     ///< what there is; never waits
  bool reducing() const;                    ///< from reduce_gradients() to finish_reducing()
  bool reduced() const;                     ///< the latter would not wait
  void finish_reducing();
  void zero_grad();  ///< forgets them all, also those that are not reduced yet; between steps

  // Phases.
  void enter_forward();
  void leave_forward(bool cancelled = false);
  void enter_backward();
  bool end_call();                       ///< the backward of one of its forwards is over; true for the last of them
  bool computes_backward() const;        ///< that of another one has begun, and is not over
  void leave_backward(bool made_graph);  ///< with create_graph: the same forwards have another one
  void reset();                          ///< no forward of it is going on any more
  void cut_short();                      ///< nor will a backward follow the forwards of before
  /// Forwards with gradients since the last backward.
  int forwards() const { return forwards_ > 0 ? forwards_ : before_; }

  /// Keeps the unit's masters, and so gradients and optimizer state, in `dtype` from now on; what is computed with
  /// keeps its own. Before the first step, else InvalidArgument.
  void set_master_dtype(c10::ScalarType dtype);
  /// Sums of the unit's gradients are divided by `divisor` (> 0) from the next reduction on, instead of by the number
  /// of ranks. Between steps.
  void set_gradient_divisor(double divisor);

  /// Whether gathered parameters are freed when the unit's forward or backward ends; at first what its strategy says.
  /// Between steps, and the same on all ranks.
  bool frees_after_forward() const { return frees_after_forward_; }
  bool frees_after_backward() const { return frees_after_backward_; }
  void set_lifetimes(bool free_after_forward, bool free_after_backward);
  /// Parameters that are freed after the forward rest sharded over so many neighbours of the ranks of P until the
  /// backward gathers them from these (FlatParameter, [Note: rest]); 0: over all of P, as masters are. What P comes to
  /// share with that number counts. Between steps, and the same on all ranks. Collective.
  void set_rest_ranks(int ranks);
  /// False: the unit's gradients stay on the rank whatever the engine says of the boundary. Between steps, and the same
  /// on all ranks.
  bool reduces_gradients() const { return reduces_gradients_; }
  void set_reduces_gradients(bool reduces) { reduces_gradients_ = reduces; }
  /// Gradients that stay on the rank do so as pieces over G, as with Accumulation::two_hop; else whole. Between steps,
  /// and the same on all ranks. Throws InvalidArgument beside an observer that reduces.
  bool keeps_pieces() const { return keeps_pieces_ || sharding().options.accumulation == Accumulation::two_hop; }
  void set_keeps_pieces(bool keeps);
  /// True: every backward at a boundary reduces all of the unit's trainable parameters, those without a gradient on
  /// this rank as zeros, so that ranks may use different ones; at the end of the backward, since that is the only
  /// moment that all have in common. Between steps, and the same on all ranks.
  bool reduces_unused() const { return reduces_unused_; }
  void set_reduces_unused(bool reduces) { reduces_unused_ = reduces; }
  /// Backwards have left their gradients to a later one. The same on all ranks, whatever gradients each has.
  bool accumulating() const { return accumulating_; }
  void set_accumulating(bool accumulating) { accumulating_ = accumulating; }

  /// Shares `observer`, which is told of the unit's events from now on, until detach(); both between steps. Throws
  /// InvalidArgument for a second observer that reduces() or adjusts(), and where the degrees or Accumulation::two_hop
  /// do not allow one that reduces.
  void attach(std::shared_ptr<StepObserver> observer);
  void detach(const StepObserver& observer);
  /// The user's collectives in place of the unit's gathers over P, and of the hop of gradients over G or, where G is 1,
  /// O; null: the engine's own. Between steps, and the same on all ranks. Throws InvalidArgument for a gather where the
  /// ranks share the gathered copy already: before the first step.
  void set_gatherer(std::shared_ptr<UserCollective> gatherer);
  void set_scatterer(std::shared_ptr<UserCollective> scatterer) { context_.scatterer = std::move(scatterer); }
  /// Calls `event(observer)` for each; the event neither attaches nor detaches.
  template <class Event>
  void tell(const Event& event) {
    for (const auto& observer : observers_) event(*observer);
  }

  // For engines, and for what changes their degrees.
  void join(Engine& engine, int index, const std::string& prefix, std::shared_ptr<Workspace> workspace);
  void set_sharding(std::shared_ptr<const Sharding> sharding);
  /// frees_after_forward() after that.
  bool would_free_after_forward(const Sharding& next) const;
  /// The handle is about to go.
  void forget() { handle_ = nullptr; }

 private:
  /// A forward, for the hooks of its inputs and outputs. A tensor may be of several: what one call returned and the
  /// next one takes.
  struct Call {
    bool recorded = false;     ///< with gradients; else what is recomputed has the graph
    bool watched = false;      ///< outputs of it say when its backward begins
    int began = 0, ended = 0;  ///< the backward, counted from 1, in which its own did
  };
  void begin_backward_of(Call& call);
  void end_backward_of(Call& call);

  void begin_updates();
  void forget_gather();
  bool travels(const FlatBuffer& buffer, bool boundary) const;

  Engine* engine_;
  int index_;
  std::string name_;
  UnitHandle* handle_;
  UnitContext context_;
  std::vector<std::unique_ptr<FlatBuffer>> buffers_;
  std::vector<std::shared_ptr<StepObserver>> observers_;
  struct Update {
    FlatBuffer* buffer;
    std::shared_ptr<DeferredUpdate> run;
  };
  std::vector<Update> waiting_, begun_;  // for the next gather to begin; since then, on the lane
  std::shared_ptr<ShardedUnit*> alive_;  // hooks in a graph that outlives the unit find it empty
  Phase phase_ = Phase::idle;
  int depth_ = 0;  // of the forward within itself
  int forwards_ = 0;
  int before_ = 0;  // of the step before: a graph that was retained has another backward
  int began_ = 0;   // of their backwards
  int ended_ = 0;
  int backwards_ = 1;
  std::shared_ptr<Call> entering_, left_;     // the next one, if it is expected, and the last one
  std::vector<std::shared_ptr<Call>> calls_;  // that go on, the innermost last
  int rest_ranks_ = 0;
  // Of that many, or of what they come to; null: parameters rest as masters do.
  std::shared_ptr<comm::Group> rest_group_;
  bool frees_after_forward_;
  bool frees_after_backward_;
  bool reduces_gradients_ = true;
  bool keeps_pieces_ = false;
  bool reduces_unused_ = false;
  bool accumulating_ = false;
  bool gathered_early_ = false;
};

}  // namespace tesserae::shard
