#pragma once

#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/replica_check.h"
#include "tesserae/shard/resharding.h"
#include "tesserae/shard/shard.h"
#include "tesserae/shard/statistics.h"

namespace tesserae::shard {

class Engine;

/// While it lives, backward passes are not the last of an accumulation: see Options::accumulation. Not nested, not
/// moved.
class NoSync {
 public:
  explicit NoSync(Engine& engine);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Engine& engine_;
};

/// A model whose training state is sharded over the ranks of a job. Keeps the model alive; used from one thread.
class Sharded {
 public:
  ~Sharded();
  Sharded(Sharded&&) noexcept;

  /// This rank's shards, for an optimizer. After updating shard i it calls publish(i).
  const ShardList& shards();
  /// Makes the new values of shard `index` the ones that the next forward sees. Returns at once; the refresh overlaps.
  /// Collective where P and O differ: all ranks publish in the same order.
  void publish(int index);
  /// Forgets all gradients, also those accumulated inside no_sync.
  void zero_grad();

  /// Backward passes while it lives are not the last of an accumulation.
  NoSync no_sync();

  /// Runs `visit` for each parameter of the model under each of its names, with the values that the optimizer updates
  /// (masters in their dtype), gathered over the ranks that shard state; of a split one this rank's part. One flat
  /// buffer is in memory at a time. With `writeback`, what visit changed is kept. Collective.
  void visit_parameters(const std::function<void(const std::string& name, at::Tensor parameter)>& visit,
                        bool writeback = false);

  /// Turns the dial: cuts masters, gradients and what companions keep (Engine::add_companion) anew for other
  /// degrees, between two steps. Values stay what they are, to the bit. See reshard.h. Collective.
  Resharding reshard(const mesh::Degrees& degrees);
  /// The same, and where the state lies is changed, too. `disk`: this rank's, if it comes to lie on one that it has
  /// not.
  Resharding turn(const Setting& setting, std::shared_ptr<offload::Disk> disk = nullptr);
  /// The degrees and tiers of now.
  Setting setting() const;

  /// After Fabric::reconnect(), on a rank whose values are whole: makes the groups anew that a new rank makes in
  /// shard_model(). Then all ranks fill() the new ones. See rejoin.h. Throws comm::Mismatch where a new rank has
  /// another model. Collective.
  void rejoin();
  /// Whether each rank that is not `whole` (by job rank, the same on all) shares every chunk with one that is.
  /// `keeps_own`: see rejoin.h. Collective.
  bool can_fill(const std::vector<bool>& whole, bool keeps_own = false);
  /// Gives new ranks their masters and optimizer state; only if can_fill(). Returns the bytes that this rank sent.
  /// Collective.
  uint64_t fill(const std::vector<bool>& whole);
  /// Whether ranks that hold the same chunk still have the same bytes. See replica_check.h. Collective.
  ReplicaReport compare_replicas();
  /// False after a change of degrees that failed half-way: what this rank holds is no state of any step.
  bool whole() const;

  /// Sum over all ranks of the fabric; a collective on the control lane.
  double sum_over_ranks(double value);

  comm::Fabric& fabric();           ///< over which the state is sharded
  const Options& options() const;   ///< those of shard_model()
  comm::MeshFabric& mesh();         ///< of the job
  int64_t parameter_count() const;  ///< of the whole model; tied parameters count once
  Statistics statistics() const;    ///< of this rank
  Engine& engine();                 ///< lives as long as this does

 private:
  friend Sharded shard_model(std::shared_ptr<torch::nn::Module>, std::shared_ptr<comm::Fabric>, Options);
  Sharded(std::unique_ptr<Engine> engine, std::string description);
  std::unique_ptr<Engine> engine_;
  std::string description_;  // of the model, as ranks compare it
};

/// Shards `model` in place. The model's root and the submodules to be gathered together are Unit<...>; parameters
/// outside inner units belong to the root. Every rank calls it with the same model; ranks whose models differ throw
/// comm::Mismatch naming the parameter. Throws InvalidArgument for a root that is not a Unit, a model without
/// parameters, or impossible degrees.
Sharded shard_model(std::shared_ptr<torch::nn::Module> model, std::shared_ptr<comm::Fabric> fabric,
                    Options options = {});

/// The same for a module holder such as Unit<Gpt>.
template <class M>
Sharded shard_model(const torch::nn::ModuleHolder<M>& model, std::shared_ptr<comm::Fabric> fabric,
                    Options options = {}) {
  return shard_model(std::shared_ptr<torch::nn::Module>(model.ptr()), std::move(fabric), std::move(options));
}

}  // namespace tesserae::shard
