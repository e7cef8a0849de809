#pragma once

#include "tesserae/launch/launcher.h"

namespace tesserae::launch {

/// run_local_job on another host than the first of a job that survives losses: the ranks of this host, of which the
/// first one's launcher decides (comm/host_links.h). Throws as run_local_job does.
int follow_first_host(const LocalJob& job);

}  // namespace tesserae::launch
