#pragma once

#include <string>

#include "tesserae/watch/run_folder.h"

namespace tesserae::watch {

/// What a run is now in Prometheus' text format 0.0.4. Seconds and bytes; names begin with tesserae_. `now` (now.json)
/// and `metrics` (the last line of metrics.jsonl) may be null, and lack anything: what is missing is left out.
std::string prometheus(const Json& now, const Json& metrics, const RunFolder::Life& life);

}  // namespace tesserae::watch
