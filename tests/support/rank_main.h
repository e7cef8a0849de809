#pragma once

#include <string>

#include "tests/support/ranks.h"

namespace tesserae::testing {

/// Runs RANK_MAIN(name) as a rank does: what the process then exits with.
int run_rank(const std::string& name, const RankArgs& args);

}  // namespace tesserae::testing
