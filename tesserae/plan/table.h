#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tesserae/plan/plan.h"

namespace tesserae::plan {

/// What was planned for and the first `count` entries, as text for people: a head of a few lines, then a line for each.
/// Gigabytes are 10^9 bytes; a star marks traffic that leaves hosts.
std::string as_text(const cost::Workload& workload, const Training& training, const Cluster& cluster,
                    const std::vector<Entry>& entries, size_t count);

/// The same for programs, in bytes and seconds, hop by hop.
nlohmann::ordered_json as_json(const cost::Workload& workload, const Training& training, const Cluster& cluster,
                               const std::vector<Entry>& entries, size_t count);

}  // namespace tesserae::plan
