#pragma once

#include <string>

#include "tesserae/comm/fabric.h"

namespace tesserae::shard {

/// Throws comm::Mismatch on every rank unless all ranks pass the same text (lines). A rank whose text differs from rank
/// 0's names the first line that does; the others name such a rank. Collective over the job.
void require_agreement(comm::Fabric& fabric, const std::string& text);

}  // namespace tesserae::shard
