#pragma once

#include <cstdint>
#include <functional>

#include "tesserae/mesh/mesh.h"

namespace tesserae::config {

/// Calls `check(N)` with the number of ranks of `mesh` that shard state. Where it throws InvalidArgument for degrees
/// that do not fit, and there is a tensor axis: throws the same text as ConfigError, with what N is and for which
/// tensor-parallel degrees the check would pass. `divisible`: what these must divide beside the ranks; 0: nothing.
/// `check` is called again for them, so it keeps nothing of a call that throws.
void check_state_ranks(const mesh::Mesh& mesh, int64_t divisible, const std::function<void(int)>& check);

}  // namespace tesserae::config
