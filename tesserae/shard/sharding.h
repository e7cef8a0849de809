#pragma once

#include <memory>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/mesh/layout.h"
#include "tesserae/shard/exposed_time.h"
#include "tesserae/shard/options.h"
#include "tesserae/shard/pool.h"
#include "tesserae/shard/setting.h"
#include "tesserae/shard/statistics.h"

namespace tesserae::shard {

class StepObserver;
class UserCollective;

/// How units are sharded and over which ranks: one for all units that were sharded together over the same ranks.
/// Immutable; a turn of the dial makes another.
///
/// Units whose parameters are split over an axis that cuts the N state ranks (experts) are sharded over fewer than N
/// (mesh::state_axes); what is asked of all units is asked of N ranks: degrees are limited to theirs (mesh::limited),
/// and their gradients, in which those of the other ranks' tokens are summed already, are averaged over N as well.
struct Sharding {
  /// `fabric`: of the ranks that differ from this one on `axes` of the mesh. Throws InvalidArgument for degrees that
  /// the N ranks do not have, and as require_possible() does.
  Sharding(std::shared_ptr<comm::Fabric> fabric, const Options& options, mesh::AxisSet axes = mesh::axes::state);

  /// What degrees that are asked of N ranks are here. Throws InvalidArgument as Layout does.
  mesh::Degrees degrees_here(const mesh::Degrees& asked) const;
  /// Throws InvalidArgument for tiers that this device does not have, or where there is no disk: neither `disk` nor one
  /// of these options.
  void require_possible(const offload::Tiers& tiers, const std::shared_ptr<offload::Disk>& disk) const;
  /// The same ranks, with what `asked` comes to (see mesh::with_degrees), and on its tiers. `disk`: null: that of these
  /// options, as long as a tier is the disk.
  std::shared_ptr<const Sharding> with(const Setting& asked, std::shared_ptr<offload::Disk> disk) const;
  /// The same over the groups and lanes that the fabric has now (Fabric::reconnect).
  std::shared_ptr<const Sharding> again() const;

  const std::shared_ptr<comm::Fabric> fabric;    ///< of the ranks that shard these units' state
  const std::shared_ptr<comm::MeshFabric> mesh;  ///< of the job; never null
  const mesh::AxisSet axes;                      ///< on which these ranks differ
  const int ranks;                               ///< N: fabric->size(), or more where `axes` are less than axes::state
  const Options options;                         ///< its degrees are those of `layout`
  const mesh::Layout layout;
  const c10::Device device;        ///< where units compute
  const c10::Device state_device;  ///< where masters and gradients live between steps: the host if offloaded

  /// Memory for training state of that tier, [elements]; content undefined in memory, zeros on the disk. `travels`: to
  /// the device and back in each step, so that it is pinned on the host of an accelerator.
  at::Tensor allocate(int64_t elements, c10::ScalarType dtype, offload::Tier tier, bool travels = true) const;

  /// The groups below: they are there as long as this is (comm::Fabric::borrow).
  std::vector<std::shared_ptr<comm::Group>> borrowed;

  // Of this sharding alone, where what lies on a disk must be read beside the computation and the fabric's lanes,
  // having nothing to wait for, run their tasks at once. Null elsewhere.
  const std::unique_ptr<comm::Lane> own_gather_lane, own_reduce_lane;

  // Where parameters travel: gathered over P ranks, refreshed over the O/P owners of a piece.
  comm::Lane& gather_lane;
  comm::Group& parameter_group;
  comm::Group& refresh_group;
  // Where gradients do: hops over G, over the O/G owners of a piece, over the N/O replicas of a chunk.
  comm::Lane& reduce_lane;
  comm::Group& gradient_group;
  comm::Group& optimizer_group;
  comm::Group& replica_group;

 private:
  comm::Group& borrow(const std::vector<int>& ranks, comm::Traffic traffic);
};

/// Whether an observer may reduce in place of the three hops (StepObserver::reduces): P = G = O, being 1 or the number
/// of ranks.
bool allows_reducer(const mesh::Layout& layout);

/// What the units of an engine share: buffers, and counts of what happened.
struct Workspace {
  Pool pool;
  Statistics statistics = {};  ///< but for exposed times, which are here
  ExposedTime exposed_gather = {}, exposed_reduce = {};
};

/// What the buffers of one unit work with. The unit owns it and keeps its address.
struct UnitContext {
  std::shared_ptr<const Sharding> sharding;
  std::shared_ptr<Workspace> workspace;
  std::shared_ptr<StepObserver> reducer =
      nullptr;  ///< reduces gradients in place of the three hops; attached to the unit
  std::shared_ptr<StepObserver> adjuster = nullptr;  ///< sees averages before they are delivered; attached to the unit
  std::shared_ptr<UserCollective> gatherer = nullptr;  ///< in place of the gather over P
  std::shared_ptr<UserCollective> scatterer =
      nullptr;                  ///< in place of the hop of gradients over G or, where that is 1, O
  double gradient_divisor = 0;  ///< what sums of gradients are divided by; 0: Sharding::ranks

  Statistics& statistics() const { return workspace->statistics; }
  Pool& pool() const { return workspace->pool; }
};

}  // namespace tesserae::shard
