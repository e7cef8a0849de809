#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::checkpoint {

// What ranks tell each other about a save or a load. Collective: on the control lane, from the training thread.

/// Sums each value over all ranks.
std::vector<int64_t> sum_over_ranks(comm::Fabric& fabric, const std::vector<int64_t>& values);

/// The lowest rank on which `flag` is set; -1: on none.
int lowest_rank_with(comm::Fabric& fabric, bool flag);

/// `text` of rank `root`, on every rank.
std::string text_of(comm::Fabric& fabric, const std::string& text, int root);

}  // namespace tesserae::checkpoint
