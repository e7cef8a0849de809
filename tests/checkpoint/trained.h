#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/state.h"
#include "tesserae/optim/adamw.h"
#include "tests/shard/net.h"

namespace tesserae::testing {

using shard::testing::Net;
using shard::testing::NetOptions;

/// A small model in training on one rank: what there is to save.
class Trained {
 public:
  Trained(comm::Fabric& fabric, const NetOptions& net, const shard::Options& options);

  /// One step of AdamW. Returns the mean loss over ranks. `before_update` runs between backward and the optimizer.
  double step(const std::function<void()>& before_update = {});
  int64_t steps() const { return step_; }
  void set_steps(int64_t steps) { step_ = steps; }

  /// What a save takes: model, optimizer, and a few numbers for the trainer.
  checkpoint::State state();
  /// Loads all of it, on this rank.
  void load(const checkpoint::Checkpoint& checkpoint);

  shard::Sharded& sharded() { return sharded_; }
  optim::AdamW& optimizer() { return optimizer_; }
  comm::Fabric& fabric() { return fabric_; }

 private:
  comm::Fabric& fabric_;
  NetOptions options_;
  Net net_;
  shard::Sharded sharded_;
  optim::AdamW optimizer_;
  int64_t step_ = 0;
};

/// A fabric that belongs to somebody else.
std::shared_ptr<comm::Fabric> borrowed(comm::Fabric& fabric);

/// Whole tensors put together from the pieces of all ranks: each rank adds its own.
class Assembled {
 public:
  void add(const std::vector<checkpoint::Piece>& pieces);
  /// Bytes by name; elements that no rank added are marked.
  std::map<std::string, std::string> bytes() const;
  /// The first tensor that differs; empty: none does.
  std::string difference(const Assembled& other) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

shard::Options with_degrees(mesh::Degrees degrees);

}  // namespace tesserae::testing
