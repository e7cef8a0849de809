#pragma once

#include <memory>
#include <vector>

#include "tesserae/checkpoint/state.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/optim/optimizer.h"
#include "tesserae/shard/sharded.h"

namespace tesserae::snapshot {

/// What snapshots are of: this rank's part of a model and of its optimizer's state. Who trains owns them.
struct Subject {
  std::shared_ptr<comm::MeshFabric> mesh;
  shard::Sharded& sharded;
  optim::Optimizer& optimizer;
  /// What all ranks hold whole and alike beside parameters, as "buffer/NAME": biases of routers.
  std::vector<checkpoint::Piece> alike = {};

  const std::shared_ptr<comm::Fabric>& job() const { return mesh->job(); }
};

}  // namespace tesserae::snapshot
