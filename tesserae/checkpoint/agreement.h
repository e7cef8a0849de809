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

/// Whether `flag` is set on any member of a tensor-parallel group; what ranks of one fabric agree on, those of the
/// other tensor indices do not know yet. `tensor_group`: shard::Options::tensor_group, may be null.
bool on_any_tensor_rank(comm::Group* tensor_group, bool flag, c10::Device device);

}  // namespace tesserae::checkpoint
