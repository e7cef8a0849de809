#pragma once

#include <variant>

#include "tesserae/launch/host_ranks.h"
#include "tesserae/launch/inheritance.h"

namespace tesserae::launch {

/// run_local_job on another host than the one that decides, of a job that survives losses: the ranks of this host, of
/// which that one's launcher decides (comm/host_links.h). The exit status, or that this launcher has to decide from now
/// on. Throws as run_local_job does.
std::variant<int, Inheritance> follow_deciding_host(HostRanks& host);

}  // namespace tesserae::launch
