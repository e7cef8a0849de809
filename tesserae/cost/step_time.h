#pragma once

#include <string>

#include "tesserae/cost/facts.h"
#include "tesserae/cost/machine.h"
#include "tesserae/cost/traffic.h"
#include "tesserae/cost/transformer.h"
#include "tesserae/mesh/layout.h"

// The time of a step on a machine, stage by stage. docs/plan.md has the formulas.
namespace tesserae::cost {

/// Seconds that one rank computes for one micro-batch, forward and backward, and again forward with `recompute`. What
/// is not known of the machine takes none.
struct ComputeTime {
  double products = 0;
  double attention = 0;
  double activations = 0;  ///< norms, rotary positions, gates, sums of the residual stream
  double head = 0;         ///< the product with the vocabulary and the loss
  double more = 0;         ///< what whole steps compute longer than these by themselves
  double total() const { return products + attention + activations + head + more; }
};
/// Seconds that the products of a forward and its backward take longer, whatever the tokens, since a rank's weights, so
/// many bytes, come from memory.
double weights_seconds(double bytes, const Machine::Compute& rates);
/// Throws as Machine::of() and part_sizes() do.
ComputeTime compute_time(const model::GptConfig& model, const Execution& run, const Machine& machine,
                         const std::string& dtype);

/// Seconds of a hop if nothing hides it: over the links, or inside hosts at the rate of `inside` for the bytes of a
/// call, where that is known.
double hop_seconds(const Traffic::Hop& hop, const Links& links, const Curve& inside = {});

/// Seconds of the hops of a step, if nothing hides them, and of passes over its state: the optimizer's over what is
/// this rank's.
struct MovingTime {
  double gather = 0;
  double reduce = 0;   ///< first, second and third hop
  double refresh = 0;  ///< from the owners of masters to those who gather
  double optimizer = 0;
  double adding = 0;    ///< gradients that are not computed where they are reduced go there, and are added up
  double meetings = 0;  ///< where all ranks wait for the last one: shared copies, the norm, the end of the step
  double hops() const { return gather + reduce + refresh; }
};
MovingTime moving_time(const Facts& facts, const Machine& machine, const mesh::Degrees& degrees);

/// What may hide hops.
struct Cover {
  double computed = 0;       ///< seconds of a step
  double micro_batches = 1;  ///< in which that is
  double reducing = 1;       ///< of these, in whose backward gradients are sent: all, or the last one alone
  double root = 0;  ///< share of the parameters in the root, whose gradients come last and which is needed first
};
/// Seconds of the hops that a step shows. Gathers hide behind all that is computed, reductions behind those backwards,
/// a refresh behind the next forward, of the root nothing does; and lanes hide at most the machine's overlap of what
/// could be hidden.
double exposed_time(const MovingTime& moving, const Cover& cover, const Machine& machine);

}  // namespace tesserae::cost
