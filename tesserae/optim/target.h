#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tesserae/shard/companion.h"
#include "tesserae/shard/shard.h"

namespace tesserae::shard {
class Engine;
class Sharded;
}  // namespace tesserae::shard

namespace tesserae::optim {

/// Whose shards an optimizer updates: what this layer needs of a sharded model. Used from the training thread.
class Target {
 public:
  virtual ~Target() = default;

  virtual const shard::ShardList& shards() const = 0;
  /// State for an optimizer of that shard: zeros of the master's shape and dtype, where the run keeps such.
  virtual at::Tensor new_state(const shard::Shard& shard) = 0;
  /// Shard `index` has new values. Called for each updated shard, in order, as soon as it has them.
  virtual void publish(int index) = 0;
  /// `update` makes the new values of shard `index`, which are then published: now, or beside the next forward, on
  /// another thread. Called for each shard in order.
  virtual void update_later(int index, std::function<void()> update) = 0;
  /// Returns when all of those have run.
  virtual void complete_updates() = 0;
  /// Forgets all gradients.
  virtual void zero_grad() = 0;
  /// The companion's tensors move with the shards until what is returned is dropped; null where shards never move.
  virtual std::shared_ptr<void> add_companion(shard::Companion& companion) = 0;

  /// Whether this rank counts the parameters that all tensor-parallel ranks hold whole: true on one of them. The parts
  /// of split parameters are counted by each.
  virtual bool counts_repeated() const = 0;
  /// Collective over all ranks of the model: adds up what each computed from its own chunks, each divided by
  /// Shard::replicas (`also`, if given: replaced by its sums over ranks, on the way); and: the largest of them.
  virtual double sum_over_chunks(double value, std::vector<double>* also = nullptr) = 0;
  virtual double max_over_chunks(double value) = 0;

  /// Where sums over ranks can be computed beside the host: the device of the shards. Unset: only by sum_over_chunks().
  virtual std::optional<c10::Device> device() const { return {}; }
  /// Collective, where there is such a device: `row` (doubles there) is replaced by its sums over ranks. The host waits
  /// for nothing.
  virtual void sum_on_device(const at::Tensor& row);
  /// The same, for the host to read, which waits. What a lost rank left behind is no sum: throws as Group::to_host.
  virtual at::Tensor sum_on_host(const at::Tensor& row);
};

/// The target of a live model, which outlives it.
std::shared_ptr<Target> target_of(shard::Sharded& sharded);
std::shared_ptr<Target> target_of(shard::Engine& engine);

/// Shards that one process holds alone and that outlive the target: sums are its own, zero_grad undefines the
/// gradients, nothing moves.
class LocalTarget : public Target {
 public:
  explicit LocalTarget(std::vector<shard::Shard>& shards, std::function<void(int)> publish = {});
  const shard::ShardList& shards() const override { return shards_; }
  at::Tensor new_state(const shard::Shard& shard) override;
  void publish(int index) override;
  void update_later(int index, std::function<void()> update) override;
  void complete_updates() override {}
  void zero_grad() override;
  std::shared_ptr<void> add_companion(shard::Companion& /*companion*/) override { return {}; }
  bool counts_repeated() const override { return true; }
  double sum_over_chunks(double value, std::vector<double>* /*also*/) override { return value; }
  double max_over_chunks(double value) override { return value; }

 private:
  shard::ShardList shards_;
  std::function<void(int)> publish_;
};
std::shared_ptr<Target> target_of(std::vector<shard::Shard>& shards, std::function<void(int)> publish = {});

}  // namespace tesserae::optim
