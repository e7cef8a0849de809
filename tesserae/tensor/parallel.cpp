#include "tesserae/tensor/parallel.h"

#include "tesserae/base/error.h"
#include "tesserae/comm/same_given.h"

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

std::string Parallel::first_and(int rank) const {
  const std::vector<int>& members = group_->members();
  return cat("tensor-parallel ranks ", members[0], " and ", members[static_cast<size_t>(rank)]);
}

void Parallel::require_same(const std::vector<at::Tensor>& tensors) const {
  const auto other = comm::first_given_other(*group_, mesh_->job()->device(), tensors);
  if (!other) return;
  throw InvalidArgument("tensor::Parallel",
                        cat(first_and(other->rank), " were given different batches (", other->elements_of_first,
                            " and ", other->elements, " elements); they compute the same batch together, so all ",
                            size(), " read the same ones: deal them out by the data-parallel rank"));
}

void Parallel::require_same_random(const at::Tensor& state) const {
  const auto other = comm::first_given_other(*group_, mesh_->job()->device(), {state});
  if (!other) return;
  throw InvalidArgument("tensor::Parallel", cat(first_and(other->rank),
                                                " draw different random numbers, so that dropout would make their "
                                                "copies of one activation differ; seed all ",
                                                size(), " alike: by the data-parallel rank, if at all by a rank"));
}

}  // namespace tesserae::tensor
