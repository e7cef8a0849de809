#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/mesh/split.h"

namespace tesserae::tensor {

/// The ranks among which the tensors of a layer are split, as one of them sees them. Shared by all layers of a model.
///
/// [Note: order of collectives] The functions of this layer (functions.h) talk on the control lane and its groups: from
/// the thread that computes, or as tasks of the lane that have ended, or are ordered before what the caller's stream
/// does next, when the function returns. So the group is free between two calls, and the order of its collectives is
/// that of the calls, which is the same on all ranks that run the same model. The engine gathers and reduces on lanes
/// beside, in groups of other ranks. Neither can make the other wait for ever: what a rank waits for was begun, in the
/// same order, by every rank that has come as far in the program, so the rank that is furthest behind can always go on.
class Parallel {
 public:
  /// One rank: every tensor is whole, nothing is sent, and the functions are what they are on one process.
  Parallel();
  /// This rank's tensor group. Makes it at once, which all of its ranks do in the same order of groups.
  explicit Parallel(std::shared_ptr<comm::MeshFabric> mesh);

  int index() const { return group_->rank(); }
  int size() const { return group_->size(); }
  const std::shared_ptr<comm::MeshFabric>& mesh() const { return mesh_; }  ///< of the job; for shard::Options::mesh
  /// On the control lane.
  comm::Group& group() const { return *group_; }
  comm::Lane& lane() const { return *lane_; }

  /// Takes the group that the fabric has now (Fabric::reconnect), for all layers. Where the constructor's order of
  /// groups has it.
  void reconnect() const;

  /// Throws InvalidArgument, on all ranks, unless all have been given the same `tensors`: for a first batch, since a
  /// loader that deals different batches to these ranks would go unnoticed. Collective.
  void require_same(const std::vector<at::Tensor>& tensors) const;
  /// The same of the `state` of a generator, from which dropout draws on what is the same on all of them.
  void require_same_random(const at::Tensor& state) const;

  /// This rank's part of a tensor that is cut along `dim`.
  mesh::Split split(int dim, int blocks = 1) const { return {dim, size(), index(), blocks}; }

  /// A gathered or reduced tensor of at least so many bytes is sent in pieces, while the pieces that have come, or are
  /// still to go, are multiplied. Every rank has the same.
  int64_t piece_bytes = 1 << 20;

 private:
  std::string first_and(int rank) const;

  std::shared_ptr<comm::MeshFabric> mesh_;
  mutable comm::Group* group_;
  mutable comm::Lane* lane_;
};

}  // namespace tesserae::tensor
