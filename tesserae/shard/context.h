#pragma once

#include <functional>
#include <memory>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/pool.h"
#include "tesserae/shard/statistics.h"

namespace tesserae::shard {

/// What the flat buffers that were sharded together share; outlives them. The pool and the statistics are the engine's:
/// an engine that adopts the units of another gives theirs its own.
struct Context {
  Context(std::shared_ptr<comm::Fabric> fabric, const Options& options);

  std::shared_ptr<comm::Fabric> fabric;
  Options options;
  mesh::Layout layout;
  c10::Device device;

  // Where parameters travel ...
  comm::Lane& gather_lane;
  comm::Group& parameter_group;
  comm::Group& refresh_group;
  // ... and where gradients do: the three hops.
  comm::Lane& reduce_lane;
  comm::Group& gradient_group;
  comm::Group& optimizer_group;
  comm::Group& replica_group;

  /// Takes the place of all three hops if set: gets a flat buffer of whole gradients and, unless every rank keeps all
  /// of it (O = 1), a tensor for this rank's chunk; leaves the average there (O = 1: in the first). Called on the
  /// reduce lane. Only for strategies with P = G = O, being 1 or the number of ranks.
  std::function<void(const at::Tensor& whole, const at::Tensor& chunk)> reduce_hook;

  std::shared_ptr<Pool> pool;
  std::shared_ptr<Statistics> statistics;
};

/// Waits for `ticket` and adds what that took to `seconds`.
void wait_and_count(const comm::Ticket& ticket, double& seconds);

}  // namespace tesserae::shard
