#pragma once

#include "tesserae/comm/fabric.h"
#include "tesserae/cost/links.h"

namespace tesserae::cost {

/// Measures what carries bytes in this job, all ranks at once: gathers of a few MB inside hosts and over all of them,
/// barriers, copies in a rank's own memory. The slowest rank counts. Collective, on the control lane; some tens of
/// milliseconds (more over slow links) and 16 MB. The same on all ranks.
Links measure_links(comm::Fabric& fabric);

}  // namespace tesserae::cost
