#pragma once

#include <memory>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/axes.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::snapshot {

/// What snapshots are of: this rank's part of a model and of its optimizer's state. Who trains owns them.
struct Subject {
  std::shared_ptr<comm::Fabric> job;
  int tensor = 1;  ///< tensor-parallel ranks for each data-parallel one
  shard::Sharded& sharded;
  optim::Optimizer& optimizer;

  int data_rank() const { return mesh::Axes(job->size(), tensor).data_rank(job->rank()); }
};

}  // namespace tesserae::snapshot
