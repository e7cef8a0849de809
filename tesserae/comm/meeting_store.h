#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

/// The part below `prefix` of the store through which the ranks of `fabric` met, for libraries that make groups of
/// their own of all of them. A wait in it throws PeerLost once a rank of the fabric is lost or has left. It may outlive
/// the fabric. Null where the ranks did not meet through a store (one process, null, ranks that are threads).
c10::intrusive_ptr<c10d::Store> watched_store(Fabric& fabric, const std::string& prefix);

/// For which ranks (as they joined: mesh::World::launcher_rank) others waited when operations of this fabric failed at
/// their deadline. What Timeout::missing() says, also for who saw the failure as another library's error. Before
/// give_up().
std::vector<int> missing_ranks(const Fabric& fabric);

}  // namespace tesserae::comm
