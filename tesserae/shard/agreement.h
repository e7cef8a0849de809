#pragma once

#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::shard {

/// Throws comm::Mismatch on every rank unless all ranks pass the same text (lines). A rank whose text differs from rank
/// 0's names the first line that does; the others name such a rank. Collective over the job.
void require_agreement(comm::Fabric& fabric, const std::string& text);

/// What each rank passes, by rank. Collective over the job.
std::vector<double> from_all_ranks(comm::Fabric& fabric, double value, comm::Label label = {});

}  // namespace tesserae::shard
