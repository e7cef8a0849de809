#pragma once

#include <memory>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/pool.h"
#include "tesserae/shard/statistics.h"

namespace tesserae::shard {

/// What the parts of one engine share. Made once at set-up; outlives them.
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

  Pool pool;
  Statistics statistics;
};

/// Waits for `ticket` and adds what that took to `seconds`.
void wait_and_count(const comm::Ticket& ticket, double& seconds);

}  // namespace tesserae::shard
