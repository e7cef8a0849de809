#pragma once

#include "tesserae/cost/facts.h"
#include "tesserae/mesh/layout.h"

namespace tesserae::cost {

/// Bytes of one rank between steps and in flight.
struct RankMemory {
  double pieces = 0;      ///< c Psi / P; 0 where the master is the piece
  double masters = 0;     ///< m Psi / O
  double state = 0;       ///< s Psi / O
  double gradients = 0;   ///< m Psi / O, and g Psi / G of an accumulation in two hops, g Psi of one on the rank
  double gathered = 0;    ///< buffers of gathered units that are this rank's own
  double reductions = 0;  ///< buffers of gradients being reduced
  double window = 0;      ///< for blocks on their way between memory and disk

  double total() const { return pieces + masters + state + gradients + gathered + reductions + window; }
};

/// The layout-dependent memory of `rank`. What it shares with others (Facts::shared_copy) is not in it.
RankMemory memory_of_rank(const Facts& facts, const mesh::Degrees& degrees, int rank);

/// The layout-dependent bytes of the fullest place: a host with all that its ranks hold and share, or a device.
double memory_of(const Facts& facts, const mesh::Degrees& degrees);

}  // namespace tesserae::cost
