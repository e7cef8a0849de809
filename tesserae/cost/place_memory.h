#pragma once

#include "tesserae/comm/fabric.h"

namespace tesserae::cost {

/// Memory as one rank sees it at a step edge, in bytes.
struct PlaceMemory {
  double used = 0;       ///< the most that this rank held since the last call
  double transient = 0;  ///< of it, what is free again now
  double free = 0;       ///< of the place now: the host, or this rank's device
  double total = 0;      ///< of the place; 0: unknown
};
PlaceMemory place_memory(c10::Device device);

/// free and total of the place, over all ranks of the job, that has the smallest share free. Collective.
PlaceMemory fullest_place(comm::Fabric& fabric);

}  // namespace tesserae::cost
