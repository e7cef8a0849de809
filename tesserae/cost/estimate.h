#pragma once

#include <optional>
#include <string>

#include "tesserae/cost/facts.h"
#include "tesserae/cost/links.h"
#include "tesserae/mesh/layout.h"

namespace tesserae::cost {

/// Seconds of a step that depend on the degrees if nothing hides them: all hops over their slowest links, and the
/// optimizer's pass over its chunk: moving_time() of a machine of which nothing but its links is known.
double moving_seconds(const Facts& facts, const Links& links, const mesh::Degrees& degrees);

/// The degrees to begin with, before anything was measured: those with the fewest moving_seconds among all that leave
/// `headroom` of `place` bytes free if half of the rest goes to activations; if there are none, those that need least.
/// `available`: what is free of the place before the model is there.
///
/// `activations`: of that place, where state may go to a disk: if even the degrees that need least do not fit beside
/// them, as much of it does as must. The optimizer's first, then gradients, then parameters; sharded over all ranks, so
/// that the least travels.
struct FirstChoice {
  mesh::Degrees degrees;
  offload::Tiers tiers;
  std::string why;
};
FirstChoice first_choice(const Facts& facts, const Links& links, double place, double available, double headroom,
                         std::optional<double> activations = std::nullopt);

}  // namespace tesserae::cost
