#pragma once

#include <string>

#include "tesserae/config/config.h"
#include "tesserae/mesh/layout.h"

namespace tesserae::train {

// A configuration is written for some number of ranks: it says how many samples each of them takes, and over how many
// the state is sharded. Here is what it says of others, on which the same job trains to the same numbers.

/// For how many ranks the configuration of this process was written: `ranks` of the job, unless the launcher says that
/// it began with others.
int configured_ranks(int ranks);

/// `written`, which is for `from` ranks, for `to`: a step has the same samples, in micro-batches that are no larger
/// than before; an evaluation has the same, or fills up its last batch; degrees that `to` ranks do not allow become the
/// nearest that they do. Throws InvalidArgument for a number that cannot be.
config::Config for_ranks(const config::Config& written, int from, int to);

/// `written` with another number of ranks that share out experts. Throws ConfigError where the model has none.
config::Config with_experts(const config::Config& written, int degree);

/// Why the job cannot have `to` ranks, as people read it, with the nearest numbers that it can have; empty: it can.
std::string why_not(const config::Config& written, int from, int to);

/// Of the degrees that so many state ranks allow, those that differ by the smallest factors; of two that are as near,
/// those that shard more.
mesh::Degrees nearest_degrees(const mesh::Degrees& wanted, int ranks);

}  // namespace tesserae::train
