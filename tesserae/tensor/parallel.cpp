#include "tesserae/tensor/parallel.h"

namespace tesserae::tensor {

Parallel::Parallel() : Parallel(comm::Fabric::null(mesh::World::single_host(0, 1)), {0}) {}

Parallel::Parallel(comm::MeshFabric& mesh)
    : Parallel(mesh.job(), mesh.mesh().members(mesh::axes::tensor, mesh.rank())) {}

Parallel::Parallel(std::shared_ptr<comm::Fabric> fabric, const std::vector<int>& members)
    : fabric_(std::move(fabric)),
      group_(&fabric_->group(members, comm::Traffic::control)),
      lane_(&fabric_->lane(comm::Traffic::control)) {}

}  // namespace tesserae::tensor
