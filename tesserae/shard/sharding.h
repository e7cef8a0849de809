#pragma once

#include <memory>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/pool.h"
#include "tesserae/shard/statistics.h"

namespace tesserae::shard {

class StepObserver;

/// How units are sharded and over which ranks: one for all units that were sharded together. Immutable; a change of
/// degrees makes another.
struct Sharding {
  Sharding(std::shared_ptr<comm::Fabric> fabric, const Options& options);

  const std::shared_ptr<comm::Fabric> fabric;    ///< of the ranks that shard these units' state
  const std::shared_ptr<comm::MeshFabric> mesh;  ///< of the job; never null
  const Options options;
  const mesh::Layout layout;
  const c10::Device device;        ///< where units compute
  const c10::Device state_device;  ///< where masters and gradients live between steps: the host if offloaded

  // Where parameters travel: gathered over P ranks, refreshed over the O/P owners of a piece.
  comm::Lane& gather_lane;
  comm::Group& parameter_group;
  comm::Group& refresh_group;
  // Where gradients do: hops over G, over the O/G owners of a piece, over the N/O replicas of a chunk.
  comm::Lane& reduce_lane;
  comm::Group& gradient_group;
  comm::Group& optimizer_group;
  comm::Group& replica_group;
};

/// Whether an observer may reduce in place of the three hops (StepObserver::reduces): P = G = O, being 1 or the number
/// of ranks.
bool allows_reducer(const mesh::Layout& layout);

/// What the units of an engine share: buffers, and counts of what happened.
struct Workspace {
  Pool pool;
  Statistics statistics = {};
};

/// What the buffers of one unit work with. The unit owns it and keeps its address.
struct UnitContext {
  std::shared_ptr<const Sharding> sharding;
  std::shared_ptr<Workspace> workspace;
  std::shared_ptr<StepObserver> reducer =
      nullptr;  ///< reduces gradients in place of the three hops; attached to the unit
  std::shared_ptr<StepObserver> adjuster = nullptr;  ///< sees averages before they are delivered; attached to the unit
  double gradient_divisor = 0;  ///< what sums of gradients are divided by; 0: the number of ranks of the fabric

  Statistics& statistics() const { return workspace->statistics; }
  Pool& pool() const { return workspace->pool; }
};

/// Waits for `ticket` and adds what that took to `seconds`.
void wait_and_count(const comm::Ticket& ticket, double& seconds);

}  // namespace tesserae::shard
