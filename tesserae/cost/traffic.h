#pragma once

#include "tesserae/cost/facts.h"
#include "tesserae/mesh/layout.h"

namespace tesserae::cost {

/// Bytes that a rank sends in a step, by the hop that sends them, and how often; and over which link.
struct Traffic {
  struct Hop {
    double bytes = 0;
    double calls = 0;
    bool crosses = false;  ///< some group of this hop spans hosts
    double across = 0;     ///< of the bytes: to other hosts; the others stay inside
  };
  Hop gather, first_hop, second_hop, third_hop, refresh;
};
Traffic traffic_of(const Facts& facts, const mesh::Degrees& degrees);

}  // namespace tesserae::cost
