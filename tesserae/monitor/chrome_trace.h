#pragma once

#include <string>
#include <vector>

#include "tesserae/monitor/step_times.h"

namespace tesserae::monitor {

/// Timelines of the same steps of all ranks as the trace that chrome://tracing, Perfetto and torch's tools read: a rank
/// is a process, its lanes are threads, names are those of stages and units. A rank's steps begin where its first one
/// does: clocks of different hosts are not compared. `timelines`: by rank, ascending steps; `units`: names by index.
std::string chrome_trace(const std::vector<std::vector<Timeline>>& timelines, const std::vector<std::string>& units);

}  // namespace tesserae::monitor
