#pragma once

#include "tesserae/comm/fabric.h"
#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/cost/facts.h"

namespace tesserae::cost {

/// What a fabric tells of a job: hosts, whose memory is shared, and how.
Facts facts_of(const comm::Fabric& fabric);

/// Facts::tensor of a job: how many ranks of a tensor group are on the same host; the same on all ranks.
int tensor_ranks_of_host(const comm::MeshFabric& mesh);

/// Facts::shared_copy of this job: whether the transport has memory that all ranks of a host see. Collective; the same
/// on all ranks.
bool ranks_can_share(comm::Fabric& fabric);

/// Facts::two_levels of a job, from the other facts: its hosts, and whether they share memory.
bool goes_in_two_levels(const Facts& facts);

}  // namespace tesserae::cost
