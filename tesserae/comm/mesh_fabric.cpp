#include "tesserae/comm/mesh_fabric.h"

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/sub_fabric.h"

namespace tesserae::comm {
namespace {

const Fabric& required(const std::shared_ptr<Fabric>& job) {
  if (job == nullptr) throw InvalidArgument("MeshFabric", "the job's fabric is null; see comm::Fabric::connect");
  return *job;
}

}  // namespace

MeshFabric::MeshFabric(std::shared_ptr<Fabric> job) : MeshFabric(job, mesh::Mesh(required(job).size())) {}

MeshFabric::MeshFabric(std::shared_ptr<Fabric> job, const mesh::Mesh& mesh) : job_(std::move(job)), mesh_(mesh) {
  if (mesh.ranks() == required(job_).size()) return;
  throw InvalidArgument("MeshFabric", cat("a mesh of ", to_string(mesh), " for a job of ", job_->size(), " ranks"));
}

const std::shared_ptr<Fabric>& MeshFabric::over(mesh::AxisSet axes) {
  std::shared_ptr<Fabric>& part = parts_[axes];
  if (part == nullptr) part = sub_fabric(job_, mesh_.members(axes, rank()));
  return part;
}

Group& MeshFabric::group(mesh::AxisSet axes, Traffic traffic) {
  return job_->group(mesh_.members(axes, rank()), traffic);
}

}  // namespace tesserae::comm
