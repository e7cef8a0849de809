#pragma once

#include "tesserae/comm/fabric.h"
#include "tesserae/dial/estimate.h"

namespace tesserae::dial {

/// Measures what carries bytes in this job, all ranks at once: gathers of a few MB inside hosts and over all of them,
/// barriers, copies in a rank's own memory. The slowest rank counts. Collective, on the control lane; tens of
/// milliseconds and 16 MB. The same on all ranks.
Links measure_links(comm::Fabric& fabric);

/// Facts::shared_copy of this job: whether the transport has memory that all ranks of a host see. Collective; the same
/// on all ranks.
bool ranks_can_share(comm::Fabric& fabric);

/// Facts::two_levels of a job, from the other facts: its hosts, and whether they share memory.
bool goes_in_two_levels(const Facts& facts);

}  // namespace tesserae::dial
