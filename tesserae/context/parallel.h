#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "tesserae/comm/mesh_fabric.h"

namespace tesserae::context {

/// How keys and values reach the queries that attend to them. H heads, H' of keys and values, C ranks.
enum class Method {
  automatic,   ///< shared where it can be; else all_to_all where C divides H and H' and 4 (H + H') < 6 H' C;
               ///< else p2p
  shared,      ///< every rank writes its keys and values where all of the host read them: one copy a host, no gather
  p2p,         ///< from the rank that has them, piece by piece, while the piece before is worked on
  all_gather,  ///< all of them on every rank, before the work begins
  all_to_all,  ///< all positions of H / C heads instead of some positions of all heads (DeepSpeed-Ulysses)
};
std::string_view to_string(Method method);
/// "auto", "shared", "p2p", "all_gather", "all_to_all". Throws InvalidArgument naming them.
Method method_from_name(std::string_view name);

/// Whether `automatic` exchanges heads where ranks share no memory: all_to_all sends less than the other methods, and C
/// divides the heads.
bool exchanges_heads(int64_t heads, int64_t kv_heads, int64_t ranks);

/// The C ranks that read the same sequences and share out their positions, as one of them sees them. Shared by all
/// layers of a model, which call in the same order on all ranks (tensor/parallel.h, Note: order of collectives: the
/// same holds of this group).
class Parallel {
 public:
  Parallel();  ///< one rank: it has every position
  /// This rank's context group. Makes it at once, and finds out whether its ranks share memory, which all of them do in
  /// the same order of groups. Throws InvalidArgument, on all ranks, for `shared` where they do not.
  explicit Parallel(std::shared_ptr<comm::MeshFabric> mesh, Method method = Method::automatic);

  int index() const { return group_->rank(); }
  int size() const { return group_->size(); }
  const std::shared_ptr<comm::MeshFabric>& mesh() const { return mesh_; }
  comm::Group& group() const { return *group_; }  ///< on the control lane
  comm::Lane& lane() const { return *lane_; }

  /// Takes the group that the fabric has now (Fabric::reconnect), for all layers. Where the constructor's order of
  /// groups has it; throws what that does.
  void reconnect() const;

  /// The method for an attention of so many heads. `automatic` counts the elements that a rank is sent for a token and
  /// a layer, forward and backward: all_to_all (4 H + 4 H') / C, all_gather and p2p 6 H'; the choice is the rule above.
  /// Throws InvalidArgument for all_to_all if C does not divide the heads.
  Method method_for(int64_t heads, int64_t kv_heads) const;

  /// Throws InvalidArgument, on all ranks, unless all have been given the same `tokens` (int64, any shape): for a first
  /// batch, since a loader that deals different batches to context ranks would go unnoticed. Collective.
  void require_same(const at::Tensor& tokens) const;
  /// The same at the first call since the ranks met.
  void require_same_first(const at::Tensor& tokens) const;

  /// Memory of at least so many bytes that all ranks see, for one use: everyone writes its own, then a barrier, then
  /// everyone reads, until the next use. Two pieces take turns, so one barrier a use is enough: who writes into a piece
  /// again has passed the barrier of the use between, which nobody enters before it has done reading. Collective.
  at::Tensor shared_memory(int64_t bytes) const;

 private:
  std::shared_ptr<comm::MeshFabric> mesh_;
  mutable comm::Group* group_;
  mutable comm::Lane* lane_;
  Method method_;
  mutable bool shares_ = false;
  mutable std::array<at::Tensor, 2> pieces_;
  mutable size_t uses_ = 0;
  mutable bool compared_ = false;
};
using ParallelPtr = std::shared_ptr<const Parallel>;

}  // namespace tesserae::context
