#pragma once

#include "tesserae/mesh/world.h"

namespace tesserae::train {

/// This process, as number `rank`, in a job of so many ranks on its host: all else is as our launcher said.
mesh::World world_of_size(int ranks, int rank);

}  // namespace tesserae::train
