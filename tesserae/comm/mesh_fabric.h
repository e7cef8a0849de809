#pragma once

#include <map>
#include <memory>

#include "tesserae/comm/fabric.h"
#include "tesserae/mesh/mesh.h"

namespace tesserae::comm {

/// The job's fabric seen through its mesh: to get the ranks that share something with this one, name the axes on which
/// they differ (mesh::axes); nobody computes with ranks.
///
/// All answers are for this rank. One per job and process, shared by all who ask; used from the training thread. Holds
/// a reference to the fabric.
class MeshFabric {
 public:
  /// A job without axes: all ranks shard its state and read different batches.
  explicit MeshFabric(std::shared_ptr<Fabric> job);
  /// Throws InvalidArgument unless the mesh is one of the job's ranks.
  MeshFabric(std::shared_ptr<Fabric> job, const mesh::Mesh& mesh);

  const std::shared_ptr<Fabric>& job() const { return job_; }
  const mesh::Mesh& mesh() const { return mesh_; }

  int rank() const { return job_->rank(); }
  int degree(mesh::AxisSet axes) const { return mesh_.degree(axes); }
  int index(mesh::AxisSet axes) const { return mesh_.index(axes, rank()); }
  bool is_first(mesh::AxisSet axes) const { return mesh_.is_first(axes, rank()); }
  bool writes_unsplit() const { return mesh_.writes_unsplit(rank()); }
  mesh::Splits part(const mesh::Splits& splits) const { return mesh_.part(splits, rank()); }

  /// The fabric of the ranks that differ from this one on these axes only, numbered by their index; the job's own for
  /// all of them. The same at each call; no collective.
  const std::shared_ptr<Fabric>& over(mesh::AxisSet axes);
  /// The group of the same ranks, as Fabric::group makes it: all of them call, in the same order of groups.
  Group& group(mesh::AxisSet axes, Traffic traffic);

 private:
  std::shared_ptr<Fabric> job_;
  mesh::Mesh mesh_;
  std::map<mesh::AxisSet, std::shared_ptr<Fabric>> parts_;
};

}  // namespace tesserae::comm
