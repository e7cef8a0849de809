#pragma once

#include <optional>

#include "tesserae/comm/fabric.h"
#include "tesserae/preemption/watch.h"

namespace tesserae::preemption {

/// What the lowest rank that was asked to end was asked by, the same on all ranks; nothing: none was. All must end
/// after the same step, whoever was asked. Collective over the fabric, from the training thread: one all-reduce of a
/// number for each rank, and another exchange once there is something to tell.
std::optional<Notice> agree(const std::optional<Notice>& own, comm::Fabric& fabric);

/// Whether this rank asks file and command for its host: a cloud tells each machine of its own end only, and one rank
/// of it is enough. `world`: that of a fabric, which knows the hosts.
bool asks_for_host(const mesh::World& world);

}  // namespace tesserae::preemption
