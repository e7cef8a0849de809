#pragma once

#include <memory>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

/// What some ranks of a job have of its fabric: a fabric whose world is those ranks alone, numbered 0 .. n-1 in the
/// order of `members` (ascending job ranks, this one among them). The ranks that shard state are such a fabric
/// (MeshFabric::over), and an engine runs on it as on any other.
///
/// Groups and lanes are the whole fabric's, which it keeps alive: group() takes ranks of the sub-world; names, members
/// and errors of the groups tell ranks of the job. A lane carries the traffic of all fabrics of the process, so whoever
/// shares a group must submit in the same order on all of its ranks. counters() sums over the groups that were asked
/// for here. leave() is the whole fabric's. With all ranks of the job as members this is `whole` itself.
///
/// No collective. Throws InvalidArgument for members that are not as above.
std::shared_ptr<Fabric> sub_fabric(std::shared_ptr<Fabric> whole, const std::vector<int>& members);

}  // namespace tesserae::comm
