#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

Parallel::Parallel()
    : Parallel(std::make_shared<comm::MeshFabric>(comm::Fabric::null(mesh::World::single_host(0, 1)))) {}

Parallel::Parallel(std::shared_ptr<comm::MeshFabric> mesh)
    : mesh_(std::move(mesh)),
      group_(&mesh_->group(mesh::axes::tensor, comm::Traffic::control)),
      lane_(&mesh_->job()->lane(comm::Traffic::control)) {}

void Parallel::reconnect() const {
  group_ = &mesh_->group(mesh::axes::tensor, comm::Traffic::control);
  lane_ = &mesh_->job()->lane(comm::Traffic::control);
}

}  // namespace tesserae::tensor
